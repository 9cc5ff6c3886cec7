"""`meshtune schema`: the keys of a recipe."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="A table for people instead of JSON schema.")] = False,
) -> None:
    """Print the recipe's JSON schema, or a table of every key."""
    from meshtune.config.schema import json_schema
    from meshtune.config.schema import markdown as table

    print(table() if markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))
