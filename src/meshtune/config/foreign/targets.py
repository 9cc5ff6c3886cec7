"""Regular expressions over module names, as peft takes them in target_modules, as lists of names and patterns."""

from __future__ import annotations

import re

BLOCKS = ("mlp", "self_attn", "attention", "linear_attn", "feed_forward", "block_sparse_moe", "attn")
ANY_LAYER = re.compile(r"^(?:\*|[\w*.]*?\.)?layers\.\*\.(?P<block>\w+)\.(?P<leaf>[\w.]+)$")
OF_ALL = re.compile(r"^\*\.?(?:(?P<block>mlp|self_attn)\.)?(?P<leaf>\w+)$")
LIMIT = 4096
OTHER_TOWERS = ("cross_attn", "vision", "visual", "audio", "projector")


class NotExpandableError(ValueError):
    """A regular expression that is more than alternatives of names."""


def is_expression(text: str) -> bool:
    """Whether a text is an expression and not the name of one module."""
    return any(letter in text for letter in "\\[(|*+?^$") or text == "all-linear"


def names_of(expression: str) -> list[str]:
    """The names and patterns that `expression` comes to for the language model; towers beside it are left out.

    Raises NotExpandableError where it is more than names, alternatives, digits and wildcards.
    """
    texts, remaining = _alternatives(expression.strip().removeprefix("^").removesuffix("$"))
    if remaining:
        raise NotExpandableError(f"'{remaining[:20]}' in it is not a name, an alternative or a wildcard")
    chosen: dict[str, None] = {}
    for text in texts:
        if not any(tower in text for tower in OTHER_TOWERS) and "_checkpoint_wrapped_module" not in text:
            chosen[_short(text)] = None
    if not chosen:
        raise NotExpandableError("it selects nothing of the language model")
    return list(chosen)


def _short(text: str) -> str:
    """The name alone where a pattern means it in every layer: each name stands for all modules that are called so."""
    match = ANY_LAYER.match(text) or OF_ALL.match(text)
    if match and (match["block"] is None or match["block"] in BLOCKS):
        return match["leaf"]
    return text.removeprefix("*.").replace("model.language_model.", "*").replace("language_model.model.", "*")


def _alternatives(remaining: str) -> tuple[list[str], str]:
    """The texts that an expression stands for up to its end or a closing bracket, and what remains."""
    options: list[str] = []
    current = [""]
    while remaining and remaining[0] != ")":
        if remaining[0] == "|":
            options, current, remaining = options + current, [""], remaining[1:]
            continue
        pieces, remaining = _piece(remaining)
        current = [text + piece for text in current for piece in pieces]
        if len(current) + len(options) > LIMIT:
            raise NotExpandableError("it stands for too many names")
    return options + current, remaining


def _piece(remaining: str) -> tuple[list[str], str]:
    """The texts of the next element, and what remains."""
    if remaining[0] == "(":
        inner, remaining = _alternatives(remaining[3:] if remaining.startswith("(?:") else remaining[1:])
        if not remaining:
            raise NotExpandableError("a bracket is not closed")
        return _repeated(inner, remaining[1:])
    if match := re.match(r"(\\d|\[\\d\]|\[0-9\])[+*]?|\.[*+]", remaining):
        return ["*"], remaining[match.end() :]
    if match := re.match(r"\[(\d)-(\d)\]\+?|\[(\w+)\]", remaining):
        letters = match[3] or "".join(map(str, range(int(match[1]), int(match[2]) + 1)))
        return list(letters), remaining[match.end() :]
    if remaining.startswith("\\.") or remaining[0] == ".":
        return ["."], remaining.removeprefix("\\")[1:]
    if match := re.match(r"[\w-]+", remaining):
        word = match[0]
        if remaining[match.end() : match.end() + 1] in ("?", "*", "+"):
            raise NotExpandableError(f"'{word[-1]}{remaining[match.end()]}' in it repeats a letter")
        return [word], remaining[match.end() :]
    raise NotExpandableError(f"'{remaining[:20]}' in it is not a name, an alternative or a wildcard")


def _repeated(inner: list[str], remaining: str) -> tuple[list[str], str]:
    if remaining[:1] == "?":
        return [*inner, ""], remaining[1:]
    if remaining[:1] in ("*", "+", "{"):
        raise NotExpandableError("a group in it is repeated")
    return inner, remaining
