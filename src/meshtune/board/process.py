"""Which process is meant by a number: the kernel reuses pids, and clocks jump."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import platform
import signal
from typing import Any

import psutil

JOB_VARIABLE = "MESHTUNE_BOARD_JOB"  # the folder of their job, in the environment of all its processes
SECRET = "MESHTUNE_BOARD_SECRET_"  # before the name of a variable that a runner hands to its own job alone


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """A process of a machine since it booted. `started` is in the kernel's ticks since then, not in wall-clock time."""

    host: str
    boot: str
    pid: int
    started: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def is_local(self) -> bool:
        """Whether it is one of this machine's, from before a reboot perhaps."""
        return self.host == platform.node() or self.boot == _boot()

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs on this machine; one that only waits to be reaped does not."""
        return self.boot == _boot() and _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to this very process, if it still runs."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process of this machine; None if there is none."""
    started = _started(pid)
    return None if started is None else ProcessId(platform.node(), _boot(), pid, started)


def end_processes_of(folder: pathlib.Path, *, but: int | None = None) -> list[int]:
    """Kills every process of this user that belongs to the job in `folder`, except `but`; returns their pids."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in (but, os.getpid()) and process.environ().get(JOB_VARIABLE) == str(folder):
                process.kill()
                pids.append(process.pid)
    return pids


def _boot() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return str(psutil.boot_time())


def _started(pid: int) -> str | None:
    """When a process started; None if there is none, or it has ended and only waits to be reaped."""
    try:
        # After the program's name, which may hold anything: state first, the start as the 20th.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        state, started = fields.split()[0], fields.split()[19]
        return None if state in "ZX" else started
    except (OSError, IndexError):
        pass
    if pathlib.Path("/proc/self/stat").exists():
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None
