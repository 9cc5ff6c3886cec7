"""Regular expressions in strangers' files, which can take for ever to match a name of a hundred letters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

LONGEST = 10_000  # characters of a pattern
MOST_REPEATS = 8  # without an end, one after another: each may stop at every letter of a name
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def pattern_problem(pattern: str) -> str | None:
    """Why a text is not used as a pattern of names: it is no regular expression, or may take for ever to match."""
    if len(pattern) > LONGEST:
        return f"has {len(pattern):,} characters"
    try:
        re.compile(pattern)
        tree = re._parser.parse(pattern)  # pyright: ignore[reportAttributeAccessIssue]
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression ({error})"
    endless = [node for node in _nodes(tree) if str(node[0]) in REPEATS and node[1][1] > LONGEST]
    if any(str(inner[0]) in (*REPEATS, "BRANCH") for _, (_, _, body) in endless for inner in _nodes(body)):
        return "repeats a repetition or a choice without an end, which can take for ever to match"
    if len(endless) > MOST_REPEATS:
        return f"has {len(endless)} repetitions without an end; at most {MOST_REPEATS} are matched"
    return None


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (operation, argument) of a parsed pattern."""
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, re._parser.SubPattern):  # pyright: ignore[reportAttributeAccessIssue]
            yield from value.data
            waiting += [argument for _, argument in value.data]
        elif isinstance(value, list | tuple):
            waiting += value
