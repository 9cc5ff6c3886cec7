"""`meshtune data prepare`: prepares the data of a recipe here, or by the executors of datatrove on many machines.

Whichever runs it, a share is the same work: `prepare_data`, whose tasks are made by whoever comes first and read by the
others. So shares may be started, killed and started again in any order, and each ends when the data are complete.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshtune.cache import cache_folder
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import PreparedData, prepare_data
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError, pip_install
from meshtune.options import Shard

Arguments = tuple[str | None, list[str]]
"""A recipe's file and its overrides."""


def prepare_share(recipe: Recipe, shard: Shard, processes: int | None, console: Console) -> PreparedData:
    """Prepares a shard of a recipe's data with as many `processes`, and waits for what others are making; shows a bar.
    Raises UserError as `prepare_data`, and for a stream, which is tokenised while it trains."""
    if recipe.data.streaming:
        fix = "leave data.streaming out to prepare the data, or train at once"
        raise UserError("a stream is tokenised during training", where="data.streaming", fix=fix)
    tokenizer, _ = tokenizer_of(recipe.model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("opening", total=None)

        def progress(activity: str, done: int, total: int) -> None:
            if bar.tasks[line].description != activity:
                bar.reset(line, description=activity, total=total)
            bar.update(line, completed=done, total=total)

        share = (shard.index - 1, shard.count)
        return prepare_data(recipe, tokenizer, progress=progress, share=share, processes=processes, upload=True)


@dataclasses.dataclass(frozen=True)
class PrepareShare:
    """A step of a datatrove pipeline: rank r of n prepares shard r + 1 of n of a recipe's data into `cache`."""

    arguments: Arguments
    cache: str
    folder: str = dataclasses.field(default_factory=os.getcwd)

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        os.environ["MESHTUNE_CACHE"] = self.cache
        os.chdir(self.folder)
        console = Console(file=sys.stderr)
        prepare_share(load_recipe(*self.arguments), Shard(rank + 1, world_size), 1, console)


def run_executor(name: str, arguments: Arguments, workers: int, options: Mapping[str, str]) -> str | None:
    """Prepares a recipe's data in `workers` tasks of Ray, or submits as many jobs of Slurm and returns a line that says
    so.

    `options` are sbatch's (partition and time are required) or those of ray.remote. Raises UserError where an
    executor is not installed.
    """
    if name == "slurm" and shutil.which("sbatch") is None:
        fix = "log in to a machine of the cluster, or use --executor local"
        raise UserError("Slurm is not installed here: there is no sbatch", where="--executor", fix=fix)
    if name == "ray":
        _import("ray", "ray is not installed", pip_install("ray"))
    problem = "Slurm and Ray are reached through datatrove, which is not installed"
    module = _import(f"datatrove.executor.{name}", problem, pip_install("data"))
    cache = str(cache_folder().resolve())
    common: dict[str, Any] = {
        "pipeline": [PrepareShare(arguments, cache)],
        "tasks": workers,
        "workers": workers,
        "logging_dir": str(pathlib.Path(cache, "tokens", ".executors", name)),
        "skip_completed": False,  # a complete share ends at once, and sources may have changed
    }
    if name == "ray":
        os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that is started here: else 15
        module.RayPipelineExecutor(**common, ray_remote_kwargs={key: _number(options[key]) for key in options}).run()
        return None
    missing = [key for key in ("partition", "time") if key not in options]
    if missing:
        fix = f"add {' '.join(f'--option {key}=VALUE' for key in missing)}"
        raise UserError(f"a job of Slurm needs {' and '.join(missing)}", where="--option", fix=fix)
    rest = {key: value for key, value in options.items() if key not in ("partition", "time", "qos")}
    executor = module.SlurmPipelineExecutor(
        **common,
        time=options["time"],
        partition=options["partition"],
        qos=options.get("qos", ""),
        job_name="meshtune-data",
        env_command=f"export PATH={shlex.quote(str(pathlib.Path(sys.executable).parent))}:$PATH",
        sbatch_args=rest,
    )
    try:
        executor.run()
    except subprocess.CalledProcessError as problem:
        fix = "see what sbatch says above; options are given as --option mem-per-cpu=4G, for a job of one CPU"
        raise UserError("Slurm does not take the job", where="--executor", fix=fix) from problem
    logs = executor.slurm_logs_folder
    return f"job {executor.job_id} of Slurm prepares the data in {workers} tasks; its logs are in {logs}"


def _number(text: str) -> int | float | str:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _import(module: str, problem: str, fix: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{problem} ({error})", where="--executor", fix=fix) from error
