"""`meshtune launch`: a run in several processes, on this machine or by a scheduler."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.train import Arguments, Overwrite, Resume, with_flags
from meshtune.errors import UserError
from meshtune.launch.options import JobSetOptions, RayOptions, SlurmOptions, TaskOptions

app = typer.Typer(
    help="Run a recipe in several processes: here, under Slurm, Kubernetes, Ray or SkyPilot.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[pathlib.Path | None, typer.Option("--out", "-o", help="Where to write the file; - prints it.")]


@app.command()
def local(
    arguments: Arguments,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="Processes on this machine.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-d", min=1, help="Devices of each process: GPUs, or simulated devices on a CPU."),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Start again when a process is lost; give up after so many without a new checkpoint."),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Run here. The output of process 0 is shown; that of each process is in OUTPUT/logs.

    Commands that use a model follow --: meshtune launch local -n 2 -- serve MODEL mesh.tp=2 --port 8001.
    """
    from meshtune.launch.local import launch, launch_again
    from meshtune.launch.train_command import model_command, parse_restartable_command, parse_train_command
    from meshtune.terminal import console

    output = console(stderr=True)
    arguments = with_flags(arguments, resume=resume, overwrite=overwrite)
    command = model_command(arguments)
    if command is not None:
        output.print(f"logs     {command.logs}", markup=False, soft_wrap=True)
    if command is None and restarts is not None:
        restartable = parse_restartable_command(arguments)
        raise typer.Exit(launch_again(restartable, processes, devices, restarts, output))
    raise typer.Exit(launch(command or parse_train_command(arguments), processes, devices, output))


@app.command()
@expand_options()
def slurm(
    arguments: Arguments,
    options: SlurmOptions,
    out: Out = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit it with sbatch.")] = False,
) -> None:
    """Write a batch script for Slurm, with restarts, signals, containers and shared storage taken care of."""
    from meshtune.launch import slurm as writer
    from meshtune.launch.train_command import parse_restartable_command

    command = parse_restartable_command(arguments)
    path = _write(writer.batch_script(command, options), out, f"{command.name}.sbatch")
    if path is None:
        return
    if submit:
        print(f"job {writer.submit(path)} submitted; its progress: tail -F {command.logs}/process-0.log")
    else:
        print(f"submit it with: sbatch {path}")


@app.command()
@expand_options()
def k8s(arguments: Arguments, options: JobSetOptions, out: Out = None) -> None:
    """Write a JobSet or a TrainJob for Kubernetes that contains the recipe."""
    from meshtune.launch import kubernetes as writer
    from meshtune.launch.train_command import parse_restartable_command

    command = parse_restartable_command(arguments, output_is_visible=False)
    path = _write(writer.manifest(command, options), out, f"{command.name}.{options.kind}.yaml")
    if path is not None:
        print(f"start it with: kubectl apply -f {path}")


@app.command()
@expand_options()
def skypilot(arguments: Arguments, options: TaskOptions, out: Out = None) -> None:
    """Write a task for SkyPilot."""
    from meshtune.launch import skypilot as writer
    from meshtune.launch.train_command import parse_restartable_command

    command = parse_restartable_command(arguments, output_is_visible=False)
    path = _write(writer.task_yaml(command, options), out, f"{command.name}.sky.yaml")
    if path is not None:
        print(f"start it with: sky jobs launch {path}")


@app.command()
@expand_options()
def ray(arguments: Arguments, options: RayOptions) -> None:
    """Run on a cluster of Ray, at RAY_ADDRESS or on this machine; a lost process is replaced."""
    from meshtune.launch.ray import launch
    from meshtune.launch.train_command import parse_restartable_command
    from meshtune.terminal import console

    raise typer.Exit(launch(parse_restartable_command(arguments), options, console(stderr=True)))


def _write(text: str, out: pathlib.Path | None, name: str) -> pathlib.Path | None:
    """Writes the file to `out`, or `name` by default; returns its path, or None if it was printed."""
    if str(out) == "-":
        print(text, end="")
        return None
    path = out or pathlib.Path(name)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the file cannot be written: {error.strerror}", where=str(path), fix="give --out") from None
    print(f"written: {path}")
    return path
