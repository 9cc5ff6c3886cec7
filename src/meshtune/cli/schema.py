"""`meshtune schema`: the keys of a recipe, and the reference of every command."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="A list for people instead of JSON schema.")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Every command with its options, as Markdown.")] = False,
    other_tools: Annotated[
        bool, typer.Option("--other-tools", help="The keys of other tools and ours, as Markdown.")
    ] = False,
) -> None:
    """Print the recipe's JSON schema, a list of every key, or a reference of the command line."""
    if other_tools:
        from meshtune.config.foreign.keys import markdown as other_keys

        print(other_keys(), end="")
        return
    if commands:
        from meshtune.cli import main, schema

        print(schema.commands(typer.main.get_command(main.app), "meshtune"))
        return
    from meshtune.config import fields as recipe_schema

    print(
        recipe_schema.markdown() if markdown else json.dumps(recipe_schema.json_schema(), indent=2, ensure_ascii=False)
    )


Record = tuple[str, str]
"""An argument or option as `--help` shows it, and its meaning."""

SHARED = 3  # commands; a record of as many is explained once


def commands(program: Any, name: str) -> str:
    """The records that several commands share, then a section for every command, its groups' commands included."""
    found = list(_commands(program, name))
    counts = collections.Counter(record for _, _, records in found for record in records)
    shared = [record for record, count in counts.items() if count >= SHARED]
    lines = ["## Arguments and options of several commands", "", *map(_item, shared), ""]
    for title, description, records in found:
        lines += [f"## {title}", "", description, ""]
        lines += [_item(record) for record in records if record not in shared]
        above = [f"`{_name(left)}`" for left, right in records if (left, right) in shared]
        lines += [f"- as above: {', '.join(above)}"] * bool(above)
        lines.append("")
    return "\n".join(lines)


def _commands(command: Any, name: str) -> Iterator[tuple[str, str, list[Record]]]:
    """Yields the name, description and records of every command."""
    if isinstance(command, TyperGroup):
        for child in command.commands.values():
            if not child.hidden:
                yield from _commands(child, f"{name} {child.name}")
        return
    context = typer.Context(command, info_name=name, terminal_width=10_000, max_content_width=10_000)
    records = [
        (_line(record[0]), _line(record[1]))
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    yield name, _line(command.help), [record for record in records if not record[0].endswith("--help")]


def _item(record: Record) -> str:
    return f"- `{record[0].replace(' range>', '>')}`: {record[1]}"


def _name(signature: str) -> str:
    """The name of an argument, or the first long name of an option."""
    return next((part.strip(",") for part in signature.split() if part.startswith("--")), signature.rpartition(" <")[0])


def _line(text: str | None) -> str:
    """Text as one line."""
    return " ".join((text or "").replace("\f", " ").split())
