"""`meshtune quickstart`: data, training, samples and export in two minutes, without a network."""

from __future__ import annotations

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
    from rich.text import Text

    from meshtune import quickstart as built_in
    from meshtune.terminal import command, console
    from meshtune.train.run import train

    terminal = console()
    terminal.print(Text("A model of 260,000 parameters that tells stories learns to let animals sing.", style="bold"))
    # A second quickstart starts anew: the previous run is moved aside, not lost.
    recipe = built_in.recipe(output, *(overrides or []), "overwrite=true")
    result = train(recipe, console=terminal)
    if result.interrupted:
        raise typer.Exit(130)
    prompt = "One day, a kind bear named Tom went to the park."
    suggestions = {
        "ask it for a story": command("generate", output, "--prompt", prompt),
        "export a model for any other tool": command("export", output, "--to", f"{output}-merged", "--merge"),
        "train all its weights": command("train", f"{output}/recipe.yaml", f"output={output}-full", "method=full"),
    }
    terminal.print(Text("\nTry next:", style="bold"))
    for purpose, line in suggestions.items():
        terminal.print(Text(f"  {line}", style="cyan"), Text(f"    # {purpose}", style="dim"), sep="\n", soft_wrap=True)
