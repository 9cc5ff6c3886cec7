"""Several processes of one run on this machine, started, shown and ended together."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import pty
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

from rich.console import Console

from meshtune.errors import UserError
from meshtune.launch.order import Order
from meshtune.mesh.accelerators import visible_gpus
from meshtune.mesh.rendezvous import COORDINATOR, JOB, LOCAL_DEVICES, LOCAL_PROCESS, LOCAL_PROCESSES, PROCESS, PROCESSES

LAST_LINES = 15
# What the CPU's collectives say of themselves, in the middle of tables; the log keeps it.
CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected[^\n]*\n")
LEAVE = 20.0  # seconds the others have to end by themselves after a failure
SIMULATED = "--xla_force_host_platform_device_count"


@dataclasses.dataclass
class Child:
    """One process of the run; `screen` is what process 0 writes to, shown and kept."""

    number: int
    process: subprocess.Popen[bytes]
    log: pathlib.Path
    screen: int | None = None

    @property
    def code(self) -> int | None:
        """Its exit code as a shell has it, None while it runs."""
        found = self.process.poll()
        return found if found is None or found >= 0 else 128 - found


def launch(order: Order, processes: int, devices: int | None, console: Console) -> int:
    """Runs `meshtune train` in `processes` processes with `devices` each; returns the exit code.

    On GPUs the visible ones are divided (`devices` each if given); on a CPU each process simulates `devices`.
    Process 0 is shown; every process's output is added to its file in the run's logs. If one fails its last lines are
    shown, the others are ended, and its code is returned. Ctrl-C and SIGTERM go to all.
    Raises: UserError if there are not GPUs enough.
    """
    check_gpus(processes, devices, visible_gpus())
    order.logs.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    with contextlib.ExitStack() as stack:
        children = [_start(order, number, processes, devices, port, stack) for number in range(processes)]
        with _forwarding(children):
            _watch(children)
        failed = _first_failure(children)
    codes = [child.code or 0 for child in children]
    if failed is None:
        return max(codes)
    if failed.number:
        _show(failed, processes, console)
    return failed.code or 1


def check_gpus(processes: int, devices: int | None, gpus: int) -> None:
    """Raises UserError if `gpus` GPUs (0: a CPU, which simulates any number) do not do for the processes."""
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
    order: Order, number: int, processes: int, devices: int | None, port: int, stack: contextlib.ExitStack
) -> Child:
    env = dict(os.environ) | {
        COORDINATOR: f"127.0.0.1:{port}",
        PROCESSES: str(processes),
        PROCESS: str(number),
        LOCAL_PROCESS: str(number),
        LOCAL_PROCESSES: str(processes),
        JOB: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        env[LOCAL_DEVICES] = str(devices)
        if not visible_gpus():
            kept = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(SIMULATED)]
            env["XLA_FLAGS"] = " ".join([*kept, f"{SIMULATED}={devices}"])
    log = order.logs / f"process-{number}.log"
    command = [sys.executable, "-m", "meshtune", "train", *order.arguments]
    with log.open("ab") as file:
        file.write(f"--- {datetime.datetime.now():%Y-%m-%d %H:%M:%S} {shlex.join(command[2:])}\n".encode())
        file.flush()
        read, write = (None, file.fileno()) if number else _screen()
        # A session of its own: the terminal's Ctrl-C comes once, from here.
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=write, stderr=write, start_new_session=True
        )
    if read is not None:
        os.close(write)
        stack.callback(os.close, read)
    stack.callback(_kill, process)
    return Child(number, process, log, read)


def _screen() -> tuple[int, int]:
    """(read, write) for process 0: a terminal where this has one, so that its progress bar lives."""
    if not sys.stdout.isatty():
        return os.pipe()
    read, write = pty.openpty()
    size = os.get_terminal_size(sys.stdout.fileno())
    with contextlib.suppress(OSError):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    return read, write


def _watch(children: list[Child]) -> None:
    """Shows process 0 until all have ended; ends those that go on after a failure."""
    first = children[0]
    assert first.screen is not None
    failed_at: float | None = None
    open_ = True
    with first.log.open("ab") as log, selectors.DefaultSelector() as selector:
        selector.register(first.screen, selectors.EVENT_READ)
        while open_ or any(child.code is None for child in children):
            if open_:
                if selector.select(timeout=0.1):
                    open_ = _pass_on(first.screen, log)
            else:
                time.sleep(0.05)
            if failed_at is None and any(child.code for child in children):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > LEAVE:
                for child in children:
                    _kill(child.process)
            if open_ and first.code is not None and not selector.select(timeout=0.2):
                open_ = False  # a grandchild may still hold the other end


def _pass_on(screen: int, log) -> bool:
    try:
        data = os.read(screen, 1 << 16)
    except OSError:  # a terminal whose other side has closed
        return False
    if data:
        sys.stdout.buffer.write(CHATTER.sub(b"", data))
        sys.stdout.buffer.flush()
        log.write(data)
        log.flush()
    return bool(data)


def _first_failure(children: list[Child]) -> Child | None:
    """The process whose failure ended the others: what was killed, then what does not say that another was it."""
    failed = [child for child in children if child.code]
    stopped = {128 + signal.SIGTERM, 128 + signal.SIGINT}
    if not failed or all(child.code in stopped for child in children):
        return None
    killed = [child for child in failed if child.process.returncode < 0]
    own = [child for child in failed if not _names_another(child)]
    return (killed or own or failed)[0]


def _names_another(child: Child) -> bool:
    text = "\n".join(_last_lines(child.log))
    return "error: process " in text and (" was lost: " in text or " failed: " in text)


def _show(child: Child, processes: int, console: Console) -> None:
    code = child.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    console.print(
        f"process {child.number} of {processes} {how}; the end of {child.log}:", style="bold red", markup=False
    )
    for line in _last_lines(child.log):
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _last_lines(log: pathlib.Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 14)))
        return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]


@contextlib.contextmanager
def _forwarding(children: list[Child]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
