"""The reference of the command line, as Markdown: every command with its arguments and options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup


def commands(program: Any, name: str) -> str:
    """A section for every command of a program, its groups' commands included."""
    return "\n".join(line for section in _sections(program, name) for line in section)


def _sections(command: Any, name: str) -> Iterator[list[str]]:
    if isinstance(command, TyperGroup):
        for child in command.commands.values():
            if not child.hidden:
                yield from _sections(child, f"{name} {child.name}")
        return
    context = typer.Context(command, info_name=name, terminal_width=10_000, max_content_width=10_000)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    records = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    records = [(left, right) for left, right in records if not left.endswith("--help")]
    yield [f"## {name}", "", _line(command.help), "", "```text", usage, "```", ""]
    yield [*(f"- `{_line(left)}`: {_line(right)}" for left, right in records), ""]


def _line(text: str | None) -> str:
    """Text as one line."""
    return " ".join((text or "").replace("\f", " ").split())
