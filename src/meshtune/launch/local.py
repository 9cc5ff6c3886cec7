"""Runs several processes of one command on this machine: starts them, shows process 0, and ends them as a group."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import os
import pathlib
import pty
import re
import secrets
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Container, Iterator
from types import FrameType
from typing import BinaryIO

from rich.console import Console

from meshtune.errors import UserError
from meshtune.launch.train_command import ModelCommand, TrainCommand
from meshtune.mesh.accelerators import SIMULATED_DEVICES, visible_gpus
from meshtune.mesh.client import EXIT_PROCESS_LOST
from meshtune.mesh.rendezvous import (
    COORDINATOR,
    JOB,
    LOCAL_DEVICES,
    LOCAL_PROCESS,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
    SECRET,
)
from meshtune.runs.output import CHECKPOINTS

TAIL_LINES = 15  # of a failed worker's log
# Gloo prints these lines into the middle of tables; they are kept in the log only.
GLOO_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected[^\n]*\n")
EXIT_GRACE = 20.0  # seconds in which the other workers may end by themselves after a failure
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass
class Worker:
    """One process of the run. `output` is the file descriptor to read process 0's output from; None for the others."""

    index: int
    process: subprocess.Popen[bytes]
    log: pathlib.Path
    output: int | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, if one did."""
        code = self.process.poll()
        return signal.Signals(-code) if code is not None and code < 0 else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code as a shell reports it (128 + signal); None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code


def launch(command: TrainCommand | ModelCommand, processes: int, devices: int | None, console: Console) -> int:
    """Runs a command of `meshtune` in `processes` processes with `devices` devices each; returns the exit code.

    Visible GPUs are divided evenly, or `devices` to each process; on a CPU each process simulates `devices`. Process 0
    is shown; the output of every process is appended to its file in the run's logs. If one fails, the end of its log is
    shown, the others are ended, and its exit code is returned: 75 if it was killed or crashed, since the same command
    with resume=true continues the run. Ctrl-C and SIGTERM are forwarded to all.
    Raises: UserError if there are not enough GPUs.
    """
    check_gpus(processes, devices, visible_gpus())
    command.logs.mkdir(parents=True, exist_ok=True)
    port, secret = _free_port(), secrets.token_hex(32)
    with contextlib.ExitStack() as stack:
        workers = [_start(command, index, processes, devices, (port, secret), stack) for index in range(processes)]
        with _forwarded_signals(workers):
            killed = _wait(workers)
        failed = _first_failure(workers, killed)
    codes = [worker.exit_code or 0 for worker in workers]
    if failed is None:
        return max(codes)
    if failed.index:
        _show_failure(failed, processes, console)
    if failed.signal is not None and failed.signal not in STOP_SIGNALS:
        return EXIT_PROCESS_LOST
    return failed.exit_code or 1


def launch_again(command: TrainCommand, processes: int, devices: int | None, restarts: int, console: Console) -> int:
    """Launches a command that resumes, again and again while it loses processes; returns the last exit code.

    Gives up after `restarts` restarts in a row that brought no newer checkpoint.
    """
    newest, fruitless = newest_checkpoint(command.output), 0
    while (code := launch(command, processes, devices, console)) == EXIT_PROCESS_LOST:
        before, newest = newest, newest_checkpoint(command.output)
        fruitless = 0 if newest > before else fruitless + 1
        if fruitless > restarts:
            console.print(f"no newer checkpoint came of {restarts} restarts: giving up", style="bold red")
            break
        console.print(f"starting again, from update {newest}", markup=False)
    return code


def newest_checkpoint(output: pathlib.Path) -> int:
    """The number of the newest complete checkpoint of a run, or 0."""
    return max((int(path.name) for path in (output / CHECKPOINTS).glob("[0-9]*") if path.name.isdigit()), default=0)


def check_gpus(processes: int, devices: int | None, gpus: int) -> None:
    """Raises: UserError if `gpus` GPUs cannot be divided between the processes. 0 is a CPU, which simulates any number
    of devices."""
    if not gpus:
        return
    if devices is None and gpus % processes:
        raise UserError(
            f"{gpus} GPUs do not divide by {processes} processes",
            where="--processes",
            fix="give a number of processes that divides them, or --devices for each",
        )
    if devices is not None and processes * devices > gpus:
        raise UserError(
            f"{processes} processes of {devices} devices need {processes * devices} GPUs, and this machine has {gpus}",
            where="--processes, --devices",
            fix="give fewer; JAX_PLATFORMS=cpu simulates devices on the CPU",
        )


def _start(
    command: TrainCommand | ModelCommand,
    index: int,
    processes: int,
    devices: int | None,
    meeting: tuple[int, str],
    stack: contextlib.ExitStack,
) -> Worker:
    port, secret = meeting
    env = dict(os.environ) | {
        COORDINATOR: f"127.0.0.1:{port}",
        PROCESSES: str(processes),
        PROCESS: str(index),
        LOCAL_PROCESS: str(index),
        LOCAL_PROCESSES: str(processes),
        JOB: str(os.getpid()),
        SECRET: secret,
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        env[LOCAL_DEVICES] = str(devices)
        if not visible_gpus():
            flags = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(SIMULATED_DEVICES)]
            env["XLA_FLAGS"] = " ".join([*flags, f"{SIMULATED_DEVICES}={devices}"])
    log = command.logs / f"process-{index}.log"
    program = [sys.executable, "-m", "meshtune", *command.command_line]
    with log.open("ab") as file:
        file.write(f"--- {datetime.datetime.now():%Y-%m-%d %H:%M:%S} {shlex.join(program[2:])}\n".encode())
        file.flush()
        read, write = (None, file.fileno()) if index else _open_output()
        # In a session of its own, so that the terminal's Ctrl-C reaches it once only: forwarded from here.
        process = subprocess.Popen(
            program, env=env, stdin=subprocess.DEVNULL, stdout=write, stderr=write, start_new_session=True
        )
    if read is not None:
        os.close(write)
        stack.callback(os.close, read)
    stack.callback(_kill, process)
    return Worker(index, process, log, read)


def _open_output() -> tuple[int, int]:
    """(read, write) descriptors for process 0: a pseudo-terminal if stdout is one, for the progress bar."""
    if not sys.stdout.isatty():
        return os.pipe()
    read, write = pty.openpty()
    size = os.get_terminal_size(sys.stdout.fileno())
    with contextlib.suppress(OSError):
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    return read, write


def _wait(workers: list[Worker]) -> set[int]:
    """Shows process 0 until all workers have ended. Kills those that still run EXIT_GRACE seconds after a failure, and
    returns their indices."""
    killed = set[int]()
    main = workers[0]
    assert main.output is not None
    failed_at: float | None = None
    is_open = True
    with main.log.open("ab") as log, selectors.DefaultSelector() as selector:
        selector.register(main.output, selectors.EVENT_READ)
        while is_open or any(worker.exit_code is None for worker in workers):
            if is_open:
                if selector.select(timeout=0.1):
                    is_open = _copy_output(main.output, log)
            else:
                time.sleep(0.05)
            if failed_at is None and any(worker.exit_code for worker in workers):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > EXIT_GRACE:
                for worker in workers:
                    if worker.exit_code is None:
                        killed.add(worker.index)
                        _kill(worker.process)
            if is_open and main.exit_code is not None and not selector.select(timeout=0.2):
                is_open = False  # a grandchild may still hold the write end
    return killed


def _copy_output(output: int, log: BinaryIO) -> bool:
    """Copies what process 0 wrote to the terminal and the log; False at its end."""
    try:
        data = os.read(output, 1 << 16)
    except OSError:  # a pseudo-terminal whose write end was closed
        return False
    if data:
        sys.stdout.buffer.write(GLOO_NOISE.sub(b"", data))
        sys.stdout.buffer.flush()
        log.write(data)
        log.flush()
    return bool(data)


def _first_failure(workers: list[Worker], ended_here: Container[int] = ()) -> Worker | None:
    """The worker whose failure ended the others: one that a signal killed, else one whose message names no other.

    Those `ended_here`, by the launcher, are not it.
    """
    failed = [worker for worker in workers if worker.exit_code and worker.index not in ended_here]
    stop_codes = {128 + number for number in STOP_SIGNALS}
    if not failed or all(worker.exit_code in stop_codes for worker in workers):
        return None
    killed = [worker for worker in failed if worker.signal is not None]
    origin = [worker for worker in failed if not _names_another_process(worker)]
    return (killed or origin or failed)[0]


def _names_another_process(worker: Worker) -> bool:
    text = "\n".join(_log_tail(worker.log))
    return "error: process " in text and (" was lost: " in text or " failed: " in text or " does not go on: " in text)


def _show_failure(worker: Worker, processes: int, console: Console) -> None:
    how = f"was ended by {worker.signal.name}" if worker.signal else f"failed with exit code {worker.exit_code}"
    if worker.signal == signal.SIGKILL:
        how += " (as the kernel ends a process when the host runs out of memory)"
    console.print(
        f"process {worker.index} of {processes} {how}; the end of {worker.log}:", style="bold red", markup=False
    )
    for line in _log_tail(worker.log):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _log_tail(log: pathlib.Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 14)))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


@contextlib.contextmanager
def _forwarded_signals(workers: list[Worker]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
