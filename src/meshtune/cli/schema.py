"""`meshtune schema`: the keys of a recipe, and the options of every command."""

from __future__ import annotations

import json
from typing import Annotated

import typer


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
        from meshtune.cli import main, reference

        print(reference.commands(typer.main.get_command(main.app), "meshtune"))
        return
    from meshtune.config import schema as recipe_schema

    print(
        recipe_schema.markdown() if markdown else json.dumps(recipe_schema.json_schema(), indent=2, ensure_ascii=False)
    )
