"""Runs a recipe on a cluster of Ray (https://docs.ray.io): a process of `meshtune train` in each actor of a placement
group.

Ray gives the places and notices lost nodes. The processes meet, check and end each other as under any launcher; which
exit codes are worth a restart is decided here, as Ray knows none.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rich.console import Console

from meshtune.errors import UserError
from meshtune.launch.options import RayOptions
from meshtune.launch.replicas import MISTAKES, import_ray, log_tail, start_process
from meshtune.launch.train_command import TrainCommand
from meshtune.mesh.client import EXIT_PROCESS_LOST
from meshtune.mesh.rendezvous import COORDINATOR, JOB, PROCESS, PROCESSES, SECRET
from meshtune.runs.output import CHECKPOINTS

MAX_RESTARTS = 20  # in succession, without a new checkpoint
EXIT_GRACE = 60.0  # seconds in which the other processes may end by themselves after one has failed
FORWARDED = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "TMPDIR", "XLA_FLAGS")
FORWARDED_PREFIXES = ("MESHTUNE_", "JAX_", "NCCL_", "RCCL_")
STOPPED = 128 + signal.SIGTERM


@contextlib.contextmanager
def connect(ray: Any) -> Iterator[None]:
    """Connects to the cluster at RAY_ADDRESS, or starts one on this machine, until the context ends. Its workers get
    this process's variables for Python, JAX and Meshtune."""
    environment = {
        name: value for name, value in os.environ.items() if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    }
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # of a cluster that is started here: else 15, for work in the background
    runtime = {"env_vars": environment}
    ray.init(log_to_driver=False, logging_level="WARNING", include_dashboard=False, runtime_env=runtime)
    try:
        yield
    finally:
        ray.shutdown()


class Worker:
    """An actor that runs one process of the run."""

    def __init__(self, folder: str):
        os.chdir(folder)
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """This node's address with a free port, for process 0 to listen at."""
        import ray  # pyright: ignore[reportMissingImports]

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, command: list[str], log: pathlib.Path, environment: dict[str, str]) -> int:
        """Runs the process to its end; returns its exit code, negative for a signal."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = start_process(command, log, environment)
        return self._process.wait()

    def stop(self) -> None:
        """Asks the process to save and stop."""
        if self._process is not None:
            self._process.terminate()


def launch(command: TrainCommand, options: RayOptions, console: Console) -> int:
    """Runs a restartable command of `meshtune train` on Ray; returns the exit code.

    The output of process 0 is shown, and that of each process is in its file in the run's logs. After a lost process or
    node all start again, on other nodes if need be, from the last checkpoint, unless MAX_RESTARTS brought no new one.
    A user's error is not retried. Ctrl-C and SIGTERM let the run save and stop.
    Raises: UserError if Ray is not installed, or has no room for the workers in `options.start_timeout`.
    """
    ray = import_ray("meshtune launch ray")
    with connect(ray), _stop_requests() as is_stopped:
        gpus = _gpus_of_a_node(ray) if options.gpus is None else options.gpus
        restarts, newest = 0, _newest_checkpoint(command)
        while True:
            code = _attempt(ray, command, options, gpus, is_stopped, console)
            if code in (0, *MISTAKES) or is_stopped():
                return code
            before, newest = newest, _newest_checkpoint(command)
            restarts = 1 if newest > before else restarts + 1
            if restarts > MAX_RESTARTS:
                console.print(f"{MAX_RESTARTS} restarts brought no new checkpoint: giving up")
                return EXIT_PROCESS_LOST
            console.print("a process was lost: all start again from the last checkpoint")


def _attempt(ray: Any, command: TrainCommand, options: RayOptions, gpus: int, is_stopped: Any, console: Console) -> int:
    """Starts all processes once, and waits for them; returns 0, the exit code of a user's error, that of a stop, or
    EXIT_PROCESS_LOST."""
    bundle = {"CPU": options.cpus} | ({"GPU": gpus} if gpus else {})
    group = ray.util.placement_group([bundle] * options.workers, strategy="PACK")
    workers = []
    try:
        _wait_for_room(ray, group, bundle, options)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index in range(options.workers):
            place = strategy(group, placement_group_bundle_index=index)
            # A second thread, to stop the process that the first one waits for.
            actor = ray.remote(max_concurrency=2, num_cpus=options.cpus, num_gpus=gpus, scheduling_strategy=place)(
                Worker
            )
            workers.append(actor.remote(str(pathlib.Path.cwd())))
        shared = {
            COORDINATOR: ray.get(workers[0].address.remote()),
            PROCESSES: str(options.workers),
            JOB: secrets.token_hex(4),
            SECRET: secrets.token_hex(32),
            "PYTHONUNBUFFERED": "1",
            **({} if gpus else {"JAX_PLATFORMS": "cpu"}),
        }
        logs = [command.logs / f"process-{index}.log" for index in range(options.workers)]
        shown = logs[0].stat().st_size if logs[0].is_file() else 0
        line = list(command.command_line)
        runs = [
            worker.run.remote(line, log, shared | {PROCESS: str(index)})
            for index, (worker, log) in enumerate(zip(workers, logs, strict=True))
        ]
        codes = _wait(ray, workers, runs, logs[0], shown, is_stopped)
        for code in (*MISTAKES, STOPPED):
            if code in codes and not (code == STOPPED and set(codes) != {STOPPED}):
                if code in MISTAKES:
                    _show_failure(logs[codes.index(code)], codes.index(code), code, console)
                return code
        return 0 if set(codes) == {0} else EXIT_PROCESS_LOST
    except ray.exceptions.RayActorError:
        return EXIT_PROCESS_LOST  # before its process ran
    finally:
        for worker in workers:
            ray.kill(worker)
        ray.util.remove_placement_group(group)


def _wait_for_room(ray: Any, group: Any, bundle: dict[str, int], options: RayOptions) -> None:
    if not group.wait(timeout_seconds=options.start_timeout):
        amounts = ", ".join(f"{amount} {name}" for name, amount in bundle.items())
        total = {name: ray.cluster_resources().get(name, 0) for name in bundle}
        raise UserError(
            f"Ray has had no room for {options.workers} workers of {amounts} for {options.start_timeout} s; it has "
            + ", ".join(f"{amount:g} {name}" for name, amount in total.items()),
            where="--workers",
            fix="give fewer, or wait longer with --start-timeout; RAY_ADDRESS names another cluster",
        )


def _wait(
    ray: Any, workers: list[Any], runs: list[Any], log: pathlib.Path, shown: int, is_stopped: Any
) -> list[int | None]:
    """The exit codes of all processes, while the log of process 0 is shown; None for a process whose node was lost, or
    that did not end after another's failure."""
    codes: list[int | None] = [None] * len(runs)
    pending, failed_at, is_stopping = dict(zip(runs, range(len(runs)), strict=True)), None, False
    while pending:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0.3)
        shown = _copy(log, shown)
        for run in done:
            index = pending.pop(run)
            with contextlib.suppress(ray.exceptions.RayError):
                codes[index] = ray.get(run)
            if codes[index] != 0 and failed_at is None:
                failed_at = time.monotonic()
        if is_stopped() and not is_stopping:
            is_stopping = True
            workers[0].stop.remote()  # it tells the others, and all save after the same update
        if failed_at is not None and time.monotonic() - failed_at > EXIT_GRACE:
            break
    _copy(log, shown)
    return codes


def _copy(log: pathlib.Path, start: int) -> int:
    """Copies new lines of a log to the terminal; returns its new end."""
    if not log.is_file():
        return start
    with log.open("rb") as file:
        file.seek(start)
        sys.stdout.buffer.write(file.read())
        sys.stdout.buffer.flush()
        return file.tell()


def _show_failure(log: pathlib.Path, index: int, code: int, console: Console) -> None:
    if index:
        console.print(f"process {index} failed with exit code {code}; the end of {log}:", style="bold red")
        console.print(log_tail(log), markup=False, soft_wrap=True)


def _gpus_of_a_node(ray: Any) -> int:
    return int(max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0))


def _newest_checkpoint(command: TrainCommand) -> int:
    folder = command.output / CHECKPOINTS
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=-1)


@contextlib.contextmanager
def _stop_requests() -> Iterator[Any]:
    """Gives a function that says whether Ctrl-C or SIGTERM has come."""
    requests: list[int] = []

    def request(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(requests)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
