"""`meshtune quickstart`: the whole path in two minutes, with nothing from the network."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]", help="What to change in its recipe.", show_default=False),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Directory of the run.")] = "runs/quickstart",
) -> None:
    """Tune a tiny real model that comes with Meshtune, in under two minutes on two cores."""
    from rich.console import Console
    from rich.text import Text

    from meshtune import quickstart as built_in
    from meshtune.train.run import train

    console = Console(highlight=False)
    console.print(Text("A model of 260,000 parameters that tells stories learns to let animals sing.", style="bold"))
    # A second quickstart starts anew: the run before is moved aside, not lost.
    recipe = built_in.recipe(output, *(overrides or []), "overwrite=true")
    result = train(recipe, console=console)
    if result.interrupted:
        raise typer.Exit(130)
    here = shlex.quote(output)
    console.print(Text("\nTry next:", style="bold"))
    for command, about in (
        (f'meshtune generate {here} --prompt "One day, a kind bear named Tom went to the park."', "ask it for a story"),
        (f"meshtune export {here} --to {shlex.quote(output + '-merged')} --merge", "a model for any other tool"),
        (
            f"meshtune train {here}/recipe.yaml output={shlex.quote(output + '-full')} method=full",
            "train all its weights",
        ),
    ):
        console.print(Text(f"  {command}", style="cyan"), Text(f"    # {about}", style="dim"), sep="\n", soft_wrap=True)
