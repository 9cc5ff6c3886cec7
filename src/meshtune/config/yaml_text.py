"""YAML as recipes use it: version 1.2's plain scalars, no duplicate keys, and the line each key stands on.

PyYAML follows YAML 1.1, where `1e-4` is text, `no` and `off` are false, `010` is eight and `12:30` is 750. A recipe
that says `learning_rate: 1e-4` means a number, so plain scalars are resolved by the core schema of
https://yaml.org/spec/1.2.2/#103-core-schema instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import yaml

from meshtune.errors import UserError

Path = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema's scalars."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


@dataclasses.dataclass(frozen=True)
class Located:
    """What a YAML text says, and the line (from 1) on which each of its keys and list entries stands."""

    value: object
    lines: dict[Path, int]


def read(text: str, where: str) -> Located:
    """Parse one YAML document. UserError, with its line, for broken YAML, a duplicate key, a key that is not text."""
    try:
        with _loader(text) as loader:
            node = loader.get_single_node()
            lines: dict[Path, int] = {}
            if node is not None:
                _walk(node, (), lines, set(), where)
            return Located(None if node is None else loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise UserError(
            f"this is not YAML: {_problem(error)}",
            where=place,
            fix="correct that line; a value with ': ' or '#' needs quotes",
        ) from error
    except yaml.YAMLError as error:  # a character YAML does not allow: it has no mark
        raise UserError(f"this is not YAML: {error}", where=where, fix="save the file as plain UTF-8 text") from error


def scalar(text: str, where: str) -> Any:
    """The value of an override, typed as the same text would be in a recipe."""
    return read(text, where).value


def value_at(value: Any, path: Path) -> Any:
    """The value at `path` inside `value`, None where there is none."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


@contextlib.contextmanager
def _loader(text: str) -> Iterator[_Loader]:
    loader = _Loader(text)
    try:
        yield loader
    finally:
        loader.dispose()


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "\\t" in problem:
        return "a tab is used for indentation; YAML wants spaces"
    return f"{problem} ({error.context})" if error.context else problem


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], above: set[int], where: str) -> None:
    """Record the line of every key below `node`. `above`: the nodes this one stands in, since an alias may name one."""
    if id(node) in above:
        raise UserError(
            "an alias refers to a value it is part of",
            where=f"{where}, line {node.start_mark.line + 1}",
            fix="write the value out",
        )
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            _walk(entry, (*path, index), lines, above | {id(node)}, where)
    elif isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, entry in node.value:
            line = key.start_mark.line + 1
            if key.tag.endswith(":merge"):
                continue  # `<<: *defaults`: its keys keep the lines they were first written on
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                raise UserError("a key must be text", where=f"{where}, line {line}", fix="quote it")
            if key.value in first_lines:
                raise UserError(
                    f"the key '{key.value}' is given twice",
                    where=f"{where}, lines {first_lines[key.value]} and {line}",
                    fix="keep one of them",
                )
            first_lines[key.value] = line
            lines[(*path, key.value)] = line
            _walk(entry, (*path, key.value), lines, above | {id(node)}, where)
