"""Launches the processes of a small job and collects their output and exit codes."""

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

from compiling import FASTER

JOB_PROCESS = pathlib.Path(__file__).with_name("job_process.py")


@dataclasses.dataclass
class Exit:
    """How one process ended; `records` are the lines of JSON that it printed."""

    code: int
    records: list[dict[str, Any]]
    errors: str

    def value(self, key: str) -> Any:
        """The value of the first record that has `key`."""
        return next(record[key] for record in self.records if key in record)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """The running processes of one job; their output goes to files in `folder`.

    `environments` are the environment variables of each process, by default its MESHTUNE_PROCESS.
    """

    def __init__(
        self, folder: pathlib.Path, *arguments: str, environments: list[dict[str, str]] | None = None, count: int = 2
    ):
        self.folder = folder
        common = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": FASTER,
            "MESHTUNE_COORDINATOR": f"localhost:{free_port()}",
            "MESHTUNE_PROCESSES": str(count),
            "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src"),
        }
        environments = environments or [{"MESHTUNE_PROCESS": str(index)} for index in range(count)]
        self.running = []
        for index, environment in enumerate(environments):
            with (folder / f"{index}.out").open("wb") as out, (folder / f"{index}.err").open("wb") as err:
                command = [sys.executable, str(JOB_PROCESS), *arguments]
                env = os.environ | common | environment
                self.running.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))

    def wait_for(self, key: str, timeout: float = 60) -> None:
        """Waits until every process has printed a record with `key`."""
        deadline = time.monotonic() + timeout
        indices = range(len(self.running))
        while time.monotonic() < deadline:
            if all(any(key in record for record in self.records(index)) for index in indices):
                return
            if any(process.poll() is not None for process in self.running):
                break
            time.sleep(0.02)
        raise AssertionError(f"no record with {key}: {[self.errors(index)[-500:] for index in indices]}")

    def exits(self, timeout: float = 60) -> list[Exit]:
        """Waits for all processes; AssertionError if one still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            for process in self.running:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError("a process hangs") from None
        finally:
            for process in self.running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [Exit(p.returncode, self.records(n), self.errors(n)) for n, p in enumerate(self.running)]

    def records(self, index: int) -> list[dict[str, Any]]:
        lines = (self.folder / f"{index}.out").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def errors(self, index: int) -> str:
        return (self.folder / f"{index}.err").read_text()
