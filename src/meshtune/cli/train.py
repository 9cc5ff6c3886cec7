"""`meshtune train`: run a recipe."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from meshtune.mesh.rendezvous import detect_process_info


def train(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]",
            help="A YAML recipe, then what to change in it: method.rank=16 optimizer.learning_rate=1e-4 model=PATH. "
            "The recipe may be left out if the overrides say everything.",
            show_default=False,
        ),
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the output.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew; the old run is moved aside.")] = False,
) -> None:
    """Tune a model as a recipe says. Relative paths count from the current directory.

    As one of several processes (Slurm, Open MPI, Kubernetes, SkyPilot, meshtune launch) it finds the others by itself.
    """
    from meshtune.config.load import load_recipe

    recipe_file, overrides = split(arguments)
    overrides += [*["resume=true"] * resume, *["overwrite=true"] * overwrite]
    place = detect_process_info()
    if place.process_count == 1:
        load_recipe(recipe_file, overrides)  # a mistake in it is said at once: JAX takes seconds to import

    from meshtune.mesh.processes import start

    with start(place) as job:
        recipe = load_recipe(recipe_file, overrides)

        from meshtune.train.run import train as run

        result = run(recipe, job=job)
    if result.interrupted:
        raise typer.Exit(128 + result.interrupted)


def split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """(the recipe file or None, the overrides): the first argument is a file unless it can only be an override."""
    first, *rest = arguments
    if "=" in first and not os.path.exists(first):
        return None, arguments
    return first, rest
