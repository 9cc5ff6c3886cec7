"""`meshtune train` and `meshtune quickstart`, with the arguments that name a recipe."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from meshtune.mesh.rendezvous import detect_process_info

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


def train(arguments: Arguments, resume: Resume = False, overwrite: Overwrite = False) -> None:
    """Train a model as a recipe says.

    As one of several processes (Slurm, Open MPI, Kubernetes, SkyPilot, meshtune launch) it finds the others by itself.
    """
    from meshtune.config.load import load_recipe, silent, to_stderr

    recipe_file, overrides = split(arguments)
    overrides = with_flags(overrides, resume=resume, overwrite=overwrite)
    process = detect_process_info()
    if process.process_count == 1:  # mistakes are reported at once: importing JAX takes seconds
        from meshtune.setup.early import check_run
        from meshtune.train.report.events import check_installed

        early = load_recipe(recipe_file, overrides, notify=silent)
        check_run(early)
        check_installed(list(early.log.trackers))

    from meshtune.mesh.processes import start

    with start(process) as job:
        recipe = load_recipe(recipe_file, overrides, notify=to_stderr if job.is_main_process else silent)

        from meshtune.setup.program_cache import keep_programs

        keep_programs(job.process_count)
        from meshtune.train.run import train as run

        result = run(recipe, job=job)
    if result.interrupted:
        raise typer.Exit(128 + result.interrupted)


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
