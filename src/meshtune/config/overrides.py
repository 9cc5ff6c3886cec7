"""`key.sub=value` on the command line: what a recipe says, changed before it is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.renamed import current_path, renaming
from meshtune.config.short_forms import written_out
from meshtune.errors import UserError

COMMAND_LINE = "command line"


def apply(
    raw: Mapping[str, object], overrides: Sequence[str], notify: Callable[[str], None]
) -> tuple[dict[str, object], dict[yaml_text.Path, str]]:
    """`raw` with every override applied, and for each overridden path the override that set it.

    A value is YAML (`1e-4`, `true`, `null`, `[q_proj, v_proj]`) and replaces what stood at the key, the whole section
    for `method=full`. List entries go by their number: `data.train.0.cap=10`; the number after the last adds one.
    `notify` receives a notice for a key under its former name.
    """
    raw = written_out(raw)
    origins: dict[yaml_text.Path, str] = {}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not all(key.split(".")):
            raise UserError(
                f"'{override}' is not an override",
                where=COMMAND_LINE,
                fix="write key=value or section.key=value, e.g. optimizer.learning_rate=1e-4",
            )
        where = f"{COMMAND_LINE}, {override if len(override) <= 200 else f'{override[:200]}...'}"
        if key.count(".") >= yaml_text.MAX_DEPTH:
            raise UserError(f"the key has {key.count('.') + 1} parts", where=where, fix="name a key of a recipe")
        keys = [str(step) for step in current_path(tuple(key.split(".")))]
        if ".".join(keys) != key:
            section, former = key.split(".")
            notify(renaming(section, former))
        path = _put(raw, keys, yaml_text.scalar(text, where), where)
        for stale in [known for known in origins if known[: len(path)] == path]:
            del origins[stale]
        origins[path] = where
        raw = written_out(raw)
    return raw, origins


def _put(raw: Mapping[str, object], keys: list[str], value: object, where: str) -> yaml_text.Path:
    """Set the value at `keys`, making sections on the way; the path, with list indices as numbers."""
    node: Any = raw
    path: list[str | int] = []
    for depth, key in enumerate(keys):
        last = depth + 1 == len(keys)
        if isinstance(node, list):
            index = _index(key, len(node), ".".join(keys[:depth]), where)
            if index == len(node):
                node.append(None)
            path.append(index)
            if last:
                node[index] = value
            elif not isinstance(node[index], dict | list):
                node[index] = {}
            node = node[index]
        elif isinstance(node, dict):
            path.append(key)
            if last:
                node[key] = value
            elif node.get(key) in (None, "auto"):  # what was left open is now said in part
                node[key] = {}
            node = node[key]
        else:
            raise UserError(
                f"{'.'.join(keys[:depth])} is {node!r}: it has no parts to set",
                where=where,
                fix=f"write {'.'.join(keys[:depth])}=VALUE",
            )
    return tuple(path)


def _index(key: str, length: int, name: str, where: str) -> int:
    if not key.isdecimal() or len(key) > len(str(length)) or int(key) > length:
        entries = f"entries 0 to {length - 1}" if length else "no entries yet"
        raise UserError(
            f"{name} is a list with {entries}, not '{key}'",
            where=where,
            fix=f"use a number from 0 to {length}; {length} adds an entry",
        )
    return int(key)
