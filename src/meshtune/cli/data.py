"""`meshtune data inspect`: what a recipe's data become, before anything is trained."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Look at data.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Keeps `inspect` a command of its own while it is the only one."""


@app.command()
def inspect(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]",
            help="A YAML recipe, then what to change in it.",
            show_default=False,
        ),
    ],
    records: Annotated[int, typer.Option("--records", "-n", min=0, help="Documents to show token by token.")] = 3,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to show of each.")] = 400,
) -> None:
    """Show tokens, what is learned, packing efficiency, lengths, and every warning."""
    from meshtune.cli.train import split
    from meshtune.config.load import load_recipe
    from meshtune.data.inspection import inspect as look

    look(load_recipe(*split(arguments)), records=records, tokens=tokens)
