"""What a draft comes to, as text: a recipe with a comment on each line, or commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.foreign.draft import Draft, Setting
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError

WIDTH = 116


def nested(settings: dict[str, Setting]) -> dict[str, Any]:
    """The recipe that dotted keys stand for; numbers in them are entries of lists."""
    tree: dict[str, Any] = {}
    for dotted, setting in settings.items():
        node = tree
        *path, last = dotted.split(".")
        for step in path:
            node = node.setdefault(step, {})
        node[last] = setting.value
    return {key: _lists(value) for key, value in tree.items()}


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, str) and key.isdecimal() for key in node):
        return [_lists(node[key]) for key in sorted(node, key=int)]
    return {key: _lists(value) for key, value in node.items()}


def recipe_text(draft: Draft, head: list[str]) -> str:
    """The YAML of a draft: `head` and remarks, then each section in the schema's order, a comment on each line."""
    tree = nested(draft.settings)
    order = [key for key in Recipe.model_fields if key in tree]
    lines = [line for entry in (*head, *draft.remarks) for line in _wrapped(entry)]
    for key in order:
        lines += _node(key, tree[key], key, draft.settings, 0)
    return "\n".join(lines) + "\n"


def _node(key: str, value: Any, dotted: str, settings: dict[str, Setting], depth: int) -> Iterator[str]:
    indent = "  " * depth
    if dotted in settings:
        yield from _line(f"{indent}{key}: {scalar(value)}", settings[dotted].note)
    elif isinstance(value, list):
        yield f"{indent}{key}:"
        for number, entry in enumerate(value):
            body = [
                line for name, inner in entry.items()
                for line in _node(name, inner, f"{dotted}.{number}.{name}", settings, depth + 2)
            ]  # fmt: skip
            first = next(index for index, line in enumerate(body) if not line.lstrip().startswith("#"))
            body[first] = f"{indent}  - {body[first].lstrip()}"
            yield from body
    else:
        yield f"{indent}{key}:"
        for name, inner in value.items():
            yield from _node(name, inner, f"{dotted}.{name}", settings, depth + 1)


def _line(text: str, note: str) -> Iterator[str]:
    """A line with its comment, which stands above where it would be too long."""
    if len(text) + len(note) + 4 <= WIDTH:
        yield f"{text}  # {note}"
        return
    indent = text[: len(text) - len(text.lstrip())]
    yield from _wrapped(note, indent)
    yield text


def _wrapped(note: str, indent: str = "") -> Iterator[str]:
    parts, line = note.split(), f"{indent}#"
    for word in parts:
        if len(line) + len(word) + 1 > WIDTH:
            yield line
            line = f"{indent}#"
        line = f"{line} {word}"
    yield line


def scalar(value: object) -> str:
    """A value in YAML's flow style, quoted where plain text would be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {scalar(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(scalar, value)) + "]"
    text = str(value)
    try:
        plain = yaml_text.scalar(f"[{text}]", "value") == [text] and yaml_text.scalar(text, "value") == text
    except UserError:
        plain = False
    return text if plain and text.strip() == text and "#" not in text else json.dumps(text, ensure_ascii=False)


def command_text(verb: str, draft: Draft, head: list[str]) -> str:
    """A shell script with `meshtune VERB`, once for each data set, and a comment for each option."""
    lines = ["#!/bin/sh", *(line for entry in (*head, *draft.remarks) for line in _wrapped(entry))]
    lines += [line for to, setting in draft.settings.items() for line in _wrapped(f"{to}: {setting.note}")]
    data = draft.settings.get("--data")
    for number in range(len(data.value) if data is not None else 1):
        lines.append(" ".join(map(shlex.quote, _arguments(verb, draft, number))))
    return "\n".join(lines) + "\n"


def _arguments(verb: str, draft: Draft, number: int) -> Iterator[str]:
    yield from ("meshtune", verb, str(draft.settings["SOURCE"].value))
    for to, setting in draft.settings.items():
        value = setting.value
        if to == "SOURCE":
            continue
        if to == "--data":
            value = value[number]
        elif to == "--output" and len(draft.settings["--data"].value) > 1:
            value = f"{value}/{number}"
        yield to
        if value is not True:
            yield f"{value:g}" if isinstance(value, float) else str(value)
