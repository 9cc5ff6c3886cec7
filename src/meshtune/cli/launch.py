"""`meshtune launch`: a run in several processes, here or by a scheduler."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Run a recipe in several processes: here, under Slurm, Kubernetes or SkyPilot.", no_args_is_help=True
)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]",
        help="As for meshtune train: a YAML recipe, then what to change in it.",
        show_default=False,
    ),
]


@app.command()
def local(
    arguments: Arguments,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes on this machine.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-d", min=1, help="Devices each: GPUs, or on a CPU simulated devices."),
    ] = None,
) -> None:
    """Run here; process 0 is shown, each process's output is in OUTPUT/logs."""
    from rich.console import Console

    from meshtune.launch.local import launch
    from meshtune.launch.order import order

    code = launch(order(arguments), processes, devices, Console(stderr=True, highlight=False))
    raise typer.Exit(code)
