"""Changes to a recipe's YAML text that keep its comments and the order of its keys."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from meshtune.config import yaml_text
from meshtune.config.sections import written_out
from meshtune.errors import UserError

NAME = "recipe.yaml"
MAX_DEPTH = 12  # keys in the path of a change
UNSET = object()


@dataclasses.dataclass(frozen=True)
class Change:
    """`value` at `path`, keys and indices of lists; UNSET removes it."""

    path: tuple[str | int, ...]
    value: Any


def change_of(fields: object) -> Change:
    """A change from JSON: {"path": "train.steps", "value": 3}, or "text" (YAML) in place of "value", or neither.

    Raises: UserError.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("path"), str) or not fields["path"]:
        raise UserError("a change is an object with a path", where="changes", fix='send {"path": "seed", "value": 1}')
    parts = fields["path"].split(".")
    if len(parts) > MAX_DEPTH:
        problem = f"the path has {len(parts)} keys, more than any key of a recipe"
        raise UserError(problem, where="changes", fix=f"give at most {MAX_DEPTH}")
    path = tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts)
    if isinstance(fields.get("text"), str):
        return Change(path, yaml_text.scalar(fields["text"], fields["path"]))
    return Change(path, fields.get("value", UNSET))


def content_of(text: str) -> dict[str, Any]:
    """The mapping in a YAML text, {} in an empty one. Raises: UserError, whatever YAML's reader raises."""
    try:
        content = yaml_text.read(text, NAME).value
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        problem = f"this is not YAML that can be read: {str(error)[:200]}"
        raise UserError(problem, where=NAME, fix="write plain keys and values") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError("a recipe is a mapping of keys to values", where=NAME, fix="start with `model: ...`")
    return content


Expand = Callable[[Mapping[str, object]], dict[str, Any]]


def change_recipe(text: str, changes: list[Change], expand: Expand = written_out) -> str:
    """The text with changes applied in order, whose paths are those of the long form, which `expand` gives.

    Raises: UserError for a text that is not a recipe's.
    """
    for change in changes:
        text = _change_text(text, change, expand)
    return text


def dump_recipe(content: dict[str, Any]) -> str:
    """A recipe as text, in the short forms that people write."""
    return yaml.dump(_shorten(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _change_text(text: str, change: Change, expand: Expand) -> str:
    content = content_of(text)
    expected = expand(apply_change(expand(content), change))
    if expected == expand(content):
        return text
    for edit in (_replace_value, _remove_key, _insert_key):
        edited = edit(text, change)
        if edited is not None and _reads_as(edited, expected, expand):
            return edited
    return dump_recipe(expected)


def _reads_as(text: str, expected: dict[str, Any], expand: Expand) -> bool:
    try:
        return expand(content_of(text)) == expected
    except UserError:
        return False


def apply_change(content: dict[str, Any], change: Change) -> dict[str, Any]:
    """A copy of a recipe in its long form with one value changed. Sections that become empty are left out."""
    content = copy.deepcopy(content)
    _apply(content, change.path, change.value)
    return content


def _apply(container: Any, path: tuple[str | int, ...], value: Any) -> None:
    step, remaining = path[0], path[1:]
    if isinstance(container, list):
        if not isinstance(step, int) or step > len(container):
            raise UserError(f"there is no entry {step}", where="changes", fix="give the whole list")
        if step == len(container):
            container.append({} if remaining else None)
    if remaining:
        inner = container.get(step) if isinstance(container, dict) else container[int(step)]
        if not isinstance(inner, dict | list):
            if value is UNSET:
                return
            inner = {}
            container[step] = inner  # pyright: ignore[reportArgumentType, reportCallIssue]
        _apply(inner, remaining, value)
        if inner == {}:
            del container[step]  # pyright: ignore[reportArgumentType, reportCallIssue]
    elif value is not UNSET:
        container[step] = value  # pyright: ignore[reportArgumentType, reportCallIssue]
    elif isinstance(container, list) or step in container:
        del container[step]  # pyright: ignore[reportArgumentType, reportCallIssue]


def _replace_value(text: str, change: Change) -> str | None:
    """The text with another value where the path has one."""
    node = _node_at(yaml.compose(text, Loader=yaml.SafeLoader), change.path)
    if node is None or change.value is UNSET:
        return None
    start, end = node.start_mark.index, node.end_mark.index
    body = text[start:end]
    end -= len(body) - len(body.rstrip())
    return text[:start] + _flow(change.value) + text[end:]


def _remove_key(text: str, change: Change) -> str | None:
    """The text without the lines of a key of a block mapping, and without a section that has no other key."""
    if change.value is not UNSET:
        return None
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    path = change.path
    while len(path) > 1 and _has_one_key(_node_at(root, path[:-1])):
        path = path[:-1]
    parent = _node_at(root, path[:-1])
    if not isinstance(parent, yaml.MappingNode) or parent.flow_style:
        return None
    key, value = next(
        ((key, value) for key, value in parent.value if key.value == change.path[len(path) - 1]), (None, None)
    )
    if key is None or value is None:
        return None
    lines = text.splitlines(keepends=True)
    last = value.end_mark.line if value.end_mark.column and not _ends_before(value, lines) else value.end_mark.line - 1
    return "".join(lines[: key.start_mark.line] + lines[max(last, key.start_mark.line) + 1 :])


def _ends_before(node: yaml.Node, lines: list[str]) -> bool:
    """Whether the line of a node's end mark belongs to what follows: so for block collections."""
    return isinstance(node, yaml.CollectionNode) and not node.flow_style and node.end_mark.line < len(lines)


def _has_one_key(node: yaml.Node | None) -> bool:
    return isinstance(node, yaml.MappingNode) and len(node.value) == 1


def _insert_key(text: str, change: Change) -> str | None:
    """The text with a new key at the end of the innermost section that there is."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if change.value is UNSET or any(isinstance(step, int) for step in change.path):
        return None
    lines = text.splitlines()
    depths = range(len(change.path) - 1, -1, -1)
    depth = next(depth for depth in depths if depth == 0 or _node_at(root, change.path[:depth]))
    parent = _node_at(root, change.path[:depth])
    if parent is not None and (not isinstance(parent, yaml.MappingNode) or parent.flow_style):
        return None
    value: Any = change.value
    for step in reversed(change.path[depth:]):
        value = {step: value}
    column = parent.start_mark.column if parent is not None else 0
    block = [" " * column + line for line in dump_recipe(value).splitlines()]
    at = len(lines) if parent is None or depth == 0 else parent.end_mark.line + (parent.end_mark.column > 0)
    while at > 0 and (not lines[at - 1].strip() or lines[at - 1].lstrip().startswith("#")):
        at -= 1
    return "\n".join([*lines[:at], *block, *lines[at:]]) + "\n"


def _node_at(node: yaml.Node | None, path: tuple[str | int, ...]) -> yaml.Node | None:
    for step in path:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            return None
    return node


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _shorten(content: dict[str, Any]) -> dict[str, Any]:
    """The long form with paths alone where a mapping holds nothing else."""
    content = copy.deepcopy(content)
    if isinstance(model := content.get("model"), dict) and set(model) == {"path"}:
        content["model"] = model["path"]
    data = content.get("data") or {}
    for key in ("train", "validation") if isinstance(data, dict) else ():
        sources = data.get(key)
        if isinstance(sources, list) and len(sources) == 1 and isinstance(sources[0], dict):
            data[key] = sources[0]["path"] if set(sources[0]) == {"path"} else sources[0]
    for key in ("stage", "method"):
        if isinstance(content.get(key), dict) and set(content[key]) == {"kind"}:
            content[key] = content[key]["kind"]
    if isinstance(quantize := content.get("quantize"), dict) and set(quantize) == {"format"}:
        content["quantize"] = quantize["format"]
    return content


class _Dumper(yaml.SafeDumper):
    """Writes what `yaml_text` reads: numbers as 0.0002 and 1.0e-05, text in quotes where it would be another value."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = isinstance(yaml_text.scalar(value, NAME), str) if _one_plain_word(value) else True
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


def _one_plain_word(value: str) -> bool:
    return bool(value) and all(letter.isalnum() or letter in "+-._~" for letter in value)


_Dumper.add_representer(str, _text)
