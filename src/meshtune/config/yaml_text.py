"""YAML as recipes use it: version 1.2's plain scalars, no duplicate keys, and the line each key stands on.

PyYAML follows YAML 1.1, where `1e-4` is text, `no` and `off` are false, `010` is eight and `12:30` is 750. A recipe
that says `learning_rate: 1e-4` means a number, so plain scalars are resolved by the core schema of
https://yaml.org/spec/1.2.2/#103-core-schema instead.

Any text is read in bounded time and memory: its length, its depth and its number of values, those of aliases counted at
each place, have limits.
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
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 64
MAX_VALUES = 20_000  # some seconds of PyYAML
MAX_DIGITS = 100
TOO_MANY = f"it has more than {MAX_VALUES:,} values"
# The core schema's tags, and that of `<<`. PyYAML's others (!!timestamp, !!binary, ...) are no values of recipes.
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}

_SURROGATE = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema's scalars."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape
    depth = values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        self.values += 1
        if self.depth > MAX_DEPTH or self.values > 2 * MAX_VALUES:  # a key is a node too
            problem = f"it is nested more than {MAX_DEPTH} levels deep"
            problem = problem if self.depth > MAX_DEPTH else TOO_MANY
            raise yaml.constructor.ConstructorError(None, None, problem, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        problem = None
        if node is not None and node.tag not in _TAGS:
            problem = f"a recipe has no values of the type {_short(node.tag)}"
        elif isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            problem = "half of a surrogate pair is no character"
        if node is not None and problem is not None:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)  # pyright: ignore[reportUnknownMemberType]
        except (ValueError, LookupError, AttributeError):  # a tag that the text does not fit: !!bool x
            raise yaml.constructor.ConstructorError(
                None, None, f"{_short(str(node.value))} is no {node.tag.rpartition(':')[2]}", node.start_mark
            ) from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


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
    if len(text) > MAX_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"a number of more than {MAX_DIGITS} digits", node.start_mark
        )
    return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


@dataclasses.dataclass(frozen=True)
class Located:
    """The value of a YAML text, with the line (from 1) of each of its keys and list entries."""

    value: object
    lines: dict[Path, int]


def read(text: str, where: str) -> Located:
    """Parse one YAML document. UserError, with its line, for broken YAML, a duplicate key, a key that is not text, an
    alias of a collection that holds aliases, and text beyond the limits."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the YAML has {len(text):,} characters, and at most {MAX_CHARACTERS:,} are read",
            where=where,
            fix="name a recipe; data and templates lie in files of their own",
        )
    try:
        with _loader(text) as loader:
            node = loader.get_single_node()
            walk = _Walk(where)
            if node is not None:
                walk(node, (), frozenset())
            return Located(None if node is None else loader.construct_document(node), walk.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise UserError(
            f"this is not YAML: {_problem(error)}",
            where=place,
            fix="correct that line; a value with ': ' or '#' needs quotes",
        ) from error
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of characters and escapes: without a mark
        problem = str(error).splitlines()[0]
        raise UserError(f"this is not YAML: {problem}", where=where, fix="save it as plain UTF-8 text") from error


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


class _Walk:
    """Records the line of every key of a document, and refuses what no recipe says."""

    def __init__(self, where: str):
        self.where = where
        self.lines: dict[Path, int] = {}
        self._values = 0
        self._has_alias: dict[int, bool] = {}  # of the collections that were visited

    def __call__(self, node: yaml.Node, path: Path, above: frozenset[int]) -> bool:
        """Visits everything below `node`, which lies in the nodes `above`. Returns whether it is or holds an alias of
        a collection."""
        line = node.start_mark.line + 1
        self._values += 1
        if id(node) in above:
            raise self._error("an alias refers to a value it is part of", line)
        if self._values > MAX_VALUES:
            raise self._error(f"this is not a recipe: {TOO_MANY}", line)
        self.lines.setdefault(path, line)
        if not isinstance(node, yaml.CollectionNode):
            return False
        is_alias = id(node) in self._has_alias
        if self._has_alias.get(id(node)):
            raise self._error("an alias refers to a value that holds aliases itself", line)
        inside = above | {id(node)}
        entries = self._entries(node, path) if isinstance(node, yaml.MappingNode) else enumerate(node.value)
        has_alias = [self(entry, (*path, step), inside) for step, entry in entries]
        self._has_alias[id(node)] = any(has_alias)
        return is_alias or any(has_alias)

    def _entries(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, yaml.Node]]:
        first_lines: dict[str, int] = {}
        for key, entry in node.value:
            line = key.start_mark.line + 1
            if key.tag.endswith(":merge"):
                yield "<<", entry  # the keys of `<<: *defaults` keep the lines they were first written on
                continue
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith(":str"):
                raise UserError("a key must be text", where=f"{self.where}, line {line}", fix="quote it")
            if key.value in first_lines:
                raise UserError(
                    f"the key '{key.value}' is given twice",
                    where=f"{self.where}, lines {first_lines[key.value]} and {line}",
                    fix="keep one of them",
                )
            first_lines[key.value] = line
            self.lines[(*path, key.value)] = line
            yield key.value, entry

    def _error(self, problem: str, line: int) -> UserError:
        return UserError(problem, where=f"{self.where}, line {line}", fix="write the value out")
