"""How commands take a recipe: a file, then `key=value` overrides."""

from __future__ import annotations

import os
from typing import Annotated

import typer

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]",
        help="A YAML recipe, then what to change in it: method.rank=16 optimizer.learning_rate=1e-4 model=PATH. "
        "The recipe may be left out if the overrides say everything.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in the output.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew; the old run is moved aside.")]


def split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """(the recipe file or None, the overrides): the first argument is a file unless it can only be an override."""
    first, *overrides = arguments
    if "=" in first and not os.path.exists(first):
        return None, arguments
    return first, overrides


def with_flags(overrides: list[str], *, resume: bool, overwrite: bool) -> list[str]:
    """The overrides with those of --resume and --overwrite."""
    return [*overrides, *["resume=true"] * resume, *["overwrite=true"] * overwrite]
