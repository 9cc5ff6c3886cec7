"""The options of commands that share their work between replicas: `--shard`, `--replicas`, `--executor`."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable

import typer

from meshtune.errors import UserError
from meshtune.options import option, parse_shard

OPTIONS = ("--replicas", "--executor", "--sbatch", "--output", "--shard")
FLAGS = ("--overwrite", "--resume")


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the work is shared."""

    shard: str | None = option(None, "Only part I/N of the work, such as 2/8; all parts write to one folder.")
    replicas: int = option(1, "Processes with an engine each, which share the work.", ge=1)
    executor: str = option("local", "What starts the replicas: local, slurm or ray.")
    sbatch: tuple[str, ...] = option((), "An option of sbatch, for --executor slurm; may be repeated.")

    def __post_init__(self):
        parse_shard(self.shard)
        if self.shard is not None and self.replicas > 1:
            raise UserError(
                "a shard is what one replica computes", where="--shard, --replicas", fix="give only one of them"
            )


def replica_devices(mesh: list[str] | None, run: str) -> int:
    """The devices of a replica, by the arguments that give its mesh; an open axis counts as 1."""
    if mesh == ["mesh=run"]:
        from meshtune.runs.sources import run_mesh

        config = run_mesh(run)
        sizes = [] if config is None else list(config.sizes.values())
    else:
        sizes = [int(size) for size in (argument.partition("=")[2] for argument in mesh or []) if size.isdigit()]
    return math.prod(size for size in sizes if size > 0)


def run_shared(
    context: typer.Context,
    sharing: Sharing,
    output: pathlib.Path,
    *,
    devices: int,
    resume: bool,
    overwrite: bool,
    output_argument: str = "--output=",
) -> bool:
    """Runs the command of this process in replicas, where several are asked for, and whether it did. The folder of the
    results follows `output_argument`.

    Raises: UserError for an executor that is not installed, and a folder with other results; typer.Exit if a replica
    fails.
    """
    from meshtune.launch.replicas import check_executor

    check_executor(sharing.executor)
    if sharing.replicas == 1:
        return False
    from meshtune.evaluate.folder import check_folder
    from meshtune.runs.output import claim_output

    output = output.absolute()
    check_folder(output, resume=resume, overwrite=overwrite)
    if overwrite:
        with claim_output(output, overwrite=True):
            pass

    def parts() -> int:
        patterns = ("**/blocks/*.jsonl", "**/benchmarks/*.json", "journal/*.jsonl")
        return sum(1 for pattern in patterns for _ in output.glob(pattern))

    run_replicas_of(context, sharing, output, f"{output_argument}{output}", devices=devices, parts=parts)
    return True


def run_replicas_of(
    context: typer.Context,
    sharing: Sharing,
    output: pathlib.Path,
    *extra: str,
    devices: int,
    parts: Callable[[], int],
) -> None:
    """Runs the command of this process in replicas, with `extra` arguments. `parts` counts the complete parts of the
    work.

    Raises: UserError for an executor that is not installed; typer.Exit if a replica fails.
    """
    from meshtune import terminal
    from meshtune.launch.replicas import Replicas, check_executor, run_replicas, submit_replicas, without_options

    check_executor(sharing.executor)
    arguments = (*without_options(context.find_root().obj, OPTIONS, FLAGS), *extra)
    replicas = Replicas(arguments, sharing.replicas, devices, output, parts)
    if sharing.executor == "slurm":
        number = submit_replicas(replicas, sharing.sbatch)
        typer.echo(f"job {number} submitted, an array of {replicas.count}; the results will be in {output}")
    elif code := run_replicas(replicas, sharing.executor, terminal.console(stderr=True)):
        raise typer.Exit(code)
