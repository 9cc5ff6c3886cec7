"""`meshtune data inspect`: a recipe's data as the model will see them, before anything is trained."""

from __future__ import annotations

from typing import Annotated

import typer

from meshtune.cli.train import Arguments, split

app = typer.Typer(help="Look at data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _data() -> None:
    """Keeps `inspect` a subcommand while it is the only one."""


@app.command()
def inspect(
    arguments: Arguments,
    records: Annotated[
        int,
        typer.Option(
            "--records", "-n", min=0, help="Documents to show token by token, and one of each further source."
        ),
    ] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to show of each.")] = 400,
) -> None:
    """Show tokens, which of them are learned, packing efficiency, lengths, and every warning."""
    from meshtune.config.load import load_recipe
    from meshtune.setup.early import check_inputs

    recipe = load_recipe(*split(arguments))
    check_inputs(recipe)

    from meshtune.data.inspection import inspect_data

    inspect_data(recipe, records=records, tokens=tokens)
