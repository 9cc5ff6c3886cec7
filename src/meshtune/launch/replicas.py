"""Runs one command in several replicas, each with an engine and a shard of the work: here, under Slurm or on Ray.

The command has completion files (evaluate/blocks.py, synth/asking.py), so that a replica that is killed is started
again for the same shard, wherever there is room, and does only what is left. The last one that ends joins all results.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from meshtune.errors import UserError, nearest, pip_install
from meshtune.evaluate.folder import read_json, show_progress
from meshtune.launch.options import check_text
from meshtune.launch.slurm import submit
from meshtune.launch.train_command import dns_label, meshtune_executable
from meshtune.mesh.accelerators import VISIBLE_DEVICE_VARIABLES, visible_gpus
from meshtune.mesh.rendezvous import COORDINATOR, PROCESS, PROCESSES
from meshtune.options import Shard
from meshtune.runs.output import LOGS
from meshtune.runs.progress import VARIABLE

EXECUTORS = ("local", "slurm", "ray")
MISTAKES = (1, 2)  # exit codes that a restart does not change
MAX_RESTARTS = 5  # of a replica in succession, without a new part of the work
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Poll = Callable[[], int | None]
"""The exit code of a replica, negative for a signal; None while it runs."""


@dataclasses.dataclass(frozen=True)
class Replicas:
    """`count` replicas of a command of meshtune, whose results are in `output`. Each uses `devices` devices.

    `arguments` are those of the command, with its output and without the options of this class. `parts` counts the
    parts of the work that are complete.
    """

    arguments: tuple[str, ...]
    count: int
    devices: int
    output: pathlib.Path
    parts: Callable[[], int]

    def command(self, index: int) -> list[str]:
        """The command of replica `index`, counted from 1."""
        return [*self.arguments, "--shard", str(Shard(index, self.count))]

    @property
    def logs(self) -> pathlib.Path:
        return self.output / LOGS

    def log(self, index: int) -> pathlib.Path:
        return self.logs / f"replica-{index}.log"


def without_options(arguments: Sequence[str], options: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """A command line without some `options`, which have a value each, and `flags`, which have none."""
    remaining, skip = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif name in options:
            skip = not equals
        elif argument not in flags:
            remaining.append(argument)
    return tuple(remaining)


def check_executor(name: str) -> None:
    """Raises: UserError for an executor that does not exist or is not installed."""
    if name not in EXECUTORS:
        fix = f"{nearest(name, EXECUTORS)}choose from {', '.join(EXECUTORS)}"
        raise UserError(f"there is no executor '{name}'", where="--executor", fix=fix)
    if name == "ray":
        import_ray("--executor ray")


def import_ray(purpose: str) -> Any:
    """The package ray. Raises: UserError if it is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as problem:
        raise UserError("Ray is not installed", where=purpose, fix=pip_install("ray")) from problem
    return ray


def run_replicas(replicas: Replicas, executor: str, console: Console) -> int:
    """Runs all replicas to their end by the executor local or ray, and returns the exit code."""
    replicas.logs.mkdir(parents=True, exist_ok=True)
    with _local_starter(replicas) if executor == "local" else _ray_starter(replicas) as start:
        return _supervise(replicas, start, console)


def _supervise(replicas: Replicas, start: Callable[[int], Poll], console: Console) -> int:
    running = {index: start(index) for index in range(1, replicas.count + 1)}
    failures: dict[int, tuple[int, int]] = dict.fromkeys(
        running, (0, 0)
    )  # restarts in succession, and the parts there were at the last
    with show_progress(console, "answers") as progress:
        while running:
            time.sleep(0.1)
            progress(*_count_progress(replicas))
            for index, poll in list(running.items()):
                code = poll()
                if code is None:
                    continue
                del running[index]
                if code in MISTAKES:
                    console.print(f"replica {index} of {replicas.count} failed; the end of {replicas.log(index)}:")
                    console.print(log_tail(replicas.log(index)), markup=False, soft_wrap=True)
                    return code
                if code:
                    restarts, before = failures[index]
                    parts = replicas.parts()
                    restarts = 1 if parts > before else restarts + 1
                    if restarts > MAX_RESTARTS:
                        console.print(f"replica {index} was lost {restarts} times in succession; see its log")
                        return 75
                    failures[index] = restarts, parts
                    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                    console.print(f"replica {index} of {replicas.count} was ended {how}: its shard is done again")
                    running[index] = start(index)
    return 0


def _count_progress(replicas: Replicas) -> tuple[int, int]:
    done = total = 0
    for index in range(1, replicas.count + 1):
        with contextlib.suppress(UserError, OSError):
            fields = read_json(_progress_file(replicas, index))
            if fields["stage"] == "answers":
                done, total = done + fields["done"], total + fields["total"]
    return done, max(total, 1)


def _progress_file(replicas: Replicas, index: int) -> pathlib.Path:
    return replicas.logs / f".replica-{index}.progress.partial"


def log_tail(log: pathlib.Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]) if log.is_file() else ""


def _environment(replicas: Replicas, index: int) -> dict[str, str]:
    # One process, whatever launched this one: the replicas know nothing of each other.
    return {PROCESSES: "1", VARIABLE: str(_progress_file(replicas, index)), "PYTHONUNBUFFERED": "1"}


def start_process(command: Sequence[str], log: pathlib.Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a command of meshtune that ends with this process, even where this one is killed, and writes to `log`."""
    env = {name: value for name, value in os.environ.items() if name not in (PROCESS, COORDINATOR)}
    with log.open("ab") as file:
        file.write(f"--- {shlex.join(['meshtune', *command])}\n".encode())
        file.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "meshtune", *command],
            env={**env, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _local_starter(replicas: Replicas) -> Iterator[Callable[[int], Poll]]:
    """Gives each replica a share of this machine's GPUs, or of its cores."""
    gpus, cores = _visible_ids(), sorted(os.sched_getaffinity(0))
    share = len(gpus) // replicas.count
    if gpus and share < replicas.devices:
        raise UserError(
            f"{replicas.count} replicas of {replicas.devices} devices need {replicas.count * replicas.devices} GPUs, "
            f"and this machine has {len(gpus)}",
            where="--replicas",
            fix="give fewer; or --executor slurm or ray, for several machines",
        )
    processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(index: int) -> Poll:
        environment = _environment(replicas, index)
        if gpus:
            variable = next((name for name in VISIBLE_DEVICE_VARIABLES if name in os.environ), "CUDA_VISIBLE_DEVICES")
            visible = ",".join(gpus[(index - 1) * share : index * share])
            environment |= {variable: visible, "ROCR_VISIBLE_DEVICES": visible}
        process = start_process(replicas.command(index), replicas.log(index), environment)
        if not gpus and len(cores) >= replicas.count:
            os.sched_setaffinity(process.pid, cores[index - 1 :: replicas.count])
        processes[index] = process
        return process.poll

    try:
        yield start
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()


def _visible_ids() -> list[str]:
    """The names of the visible GPUs, as the drivers' variables take them."""
    for name in VISIBLE_DEVICE_VARIABLES:
        if name in os.environ and visible_gpus():
            return [device.strip() for device in os.environ[name].split(",")]
    return [str(number) for number in range(visible_gpus())]


@contextlib.contextmanager
def _ray_starter(replicas: Replicas) -> Iterator[Callable[[int], Poll]]:
    """Runs each replica as a task of Ray, on whatever node has room."""
    from meshtune.launch.ray import connect

    ray = import_ray("--executor ray")
    with connect(ray):
        gpus = replicas.devices if ray.cluster_resources().get("GPU") else 0
        # Retried here, not by Ray, which knows no exit codes.
        run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_run_replica)

        def start(index: int) -> Poll:
            environment, folder = _environment(replicas, index), str(pathlib.Path.cwd())
            reference = run.remote(replicas.command(index), replicas.log(index), environment, folder)

            def poll() -> int | None:
                done, _ = ray.wait([reference], timeout=0)
                if not done:
                    return None
                try:
                    return ray.get(reference)
                except ray.exceptions.RayError:
                    return -signal.SIGKILL  # its worker or node was lost

            return poll

        yield start


def _run_replica(command: list[str], log: pathlib.Path, environment: dict[str, str], folder: str) -> int:
    os.chdir(folder)
    return start_process(command, log, environment).wait()


def submit_replicas(replicas: Replicas, options: Sequence[str]) -> str:
    """Submits the replicas as an array of Slurm jobs with `options` of sbatch; returns the job's id."""
    replicas.logs.mkdir(parents=True, exist_ok=True)
    script = replicas.output / LOGS / "replicas.sbatch"
    script.write_text(array_script(replicas, options), encoding="utf-8")
    return submit(script)


def array_script(replicas: Replicas, options: Sequence[str]) -> str:
    """A batch script whose job N of the array computes shard N, and is requeued when it is killed."""
    check_text("the current folder", str(pathlib.Path.cwd()))
    for flag in options:
        check_text("--sbatch", flag)
        if not flag.startswith("-"):
            raise UserError(f"'{flag}' is not an option of sbatch", where="--sbatch", fix="write it as --partition=gpu")
    command = shlex.join([meshtune_executable(), *replicas.arguments])
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={dns_label(replicas.output.name)}",
        f"#SBATCH --array=1-{replicas.count}",
        *(f"#SBATCH {flag}" for flag in options),
        f"#SBATCH --chdir={shlex.quote(str(pathlib.Path.cwd()))}",
        f"#SBATCH --output={shlex.quote(str(replicas.logs))}/replica-%a.log",
        "#SBATCH --open-mode=append",
        "# After preemption or a lost node the job is requeued, and computes what is left of its shard.",
        "#SBATCH --requeue",
        f"export {PROCESSES}=1",
        f'{command} --shard "$SLURM_ARRAY_TASK_ID/{replicas.count}"',
        "code=$?",
        f"case $code in 0|{'|'.join(map(str, MISTAKES))}) exit $code ;; esac",
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {MAX_RESTARTS} ] && exit $code',
        'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"
