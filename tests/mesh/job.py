"""Starts the processes of a small job and collects how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

MEMBER = pathlib.Path(__file__).with_name("job_member.py")


@dataclasses.dataclass
class End:
    """How one process ended; `said` are its lines of JSON."""

    code: int
    said: list[dict[str, Any]]
    errors: str

    def saying(self, key: str) -> Any:
        """The value of the first line that has `key`."""
        return next(line[key] for line in self.said if key in line)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """The members of one job, running; their output is in `folder`."""

    def __init__(self, folder: pathlib.Path, *what: str, places: list[dict[str, str]] | None = None, count: int = 2):
        self.folder = folder
        common = {
            "JAX_PLATFORMS": "cpu",
            "MESHTUNE_COORDINATOR": f"localhost:{free_port()}",
            "MESHTUNE_PROCESSES": str(count),
            "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src"),
        }
        clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        places = places or [{"MESHTUNE_PROCESS": str(number)} for number in range(count)]
        self.running = []
        for number, place in enumerate(places):
            with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
                command = [sys.executable, str(MEMBER), *what]
                env = clean | common | place
                self.running.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))

    def wait_for(self, key: str, timeout: float = 60) -> None:
        """Until every process has said `key`."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if all(any(key in line for line in self.said(number)) for number in range(len(self.running))):
                return
            if any(process.poll() is not None for process in self.running):
                break
            time.sleep(0.02)
        raise AssertionError(
            f"nobody said {key}: {[self.errors(number)[-500:] for number in range(len(self.running))]}"
        )

    def ends(self, timeout: float = 60) -> list[End]:
        """How each ended; AssertionError if one still runs after `timeout` seconds."""
        until = time.monotonic() + timeout
        try:
            for process in self.running:
                process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError("a process hangs") from None
        finally:
            for process in self.running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [End(p.returncode, self.said(n), self.errors(n)) for n, p in enumerate(self.running)]

    def said(self, number: int) -> list[dict[str, Any]]:
        lines = (self.folder / f"{number}.out").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def errors(self, number: int) -> str:
        return (self.folder / f"{number}.err").read_text()
