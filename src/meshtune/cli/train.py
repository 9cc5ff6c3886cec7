"""`meshtune train`: run a recipe."""

from __future__ import annotations

import typer

from meshtune.cli.recipe_arguments import Arguments, Overwrite, Resume, split, with_flags
from meshtune.mesh.rendezvous import detect_process_info


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
        from meshtune.train.report.trackers import check_installed

        early = load_recipe(recipe_file, overrides, notify=silent)
        check_run(early)
        check_installed(list(early.log.trackers))

    from meshtune.mesh.processes import start

    with start(process) as job:
        recipe = load_recipe(recipe_file, overrides, notify=to_stderr if job.is_main_process else silent)

        from meshtune.train.run import train as run

        result = run(recipe, job=job)
    if result.interrupted:
        raise typer.Exit(128 + result.interrupted)
