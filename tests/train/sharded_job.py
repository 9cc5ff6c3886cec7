"""Starts the processes of one of the *_cases.py programs, each with some simulated devices."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

from compiling import FASTER

FOLDER = pathlib.Path(__file__).parent
SOURCE = FOLDER.parents[1] / "src"


def run(
    program: str, *arguments: str, processes: int = 1, devices: int = 1, timeout: float = 240
) -> list[tuple[int, list[dict[str, Any]], str]]:
    """(exit code, lines of JSON it printed, its errors) of each process. AssertionError if one hangs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count={devices}",
        "MESHTUNE_COORDINATOR": f"localhost:{port}",
        "MESHTUNE_PROCESSES": str(processes),
        "PYTHONPATH": str(SOURCE),
    }
    command = [sys.executable, str(FOLDER / program), *arguments]
    started = [
        subprocess.Popen(
            command,
            env=common | {"MESHTUNE_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    ended = []
    try:
        for process in started:
            output, errors = process.communicate(timeout=timeout)
            lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            ended.append((process.returncode, lines, errors))
    finally:
        for process in started:
            process.kill()
    return ended


def run_well(program: str, *arguments: str, **options: Any) -> list[list[dict[str, Any]]]:
    """Runs a program in several processes and returns the lines of each; all must end well."""
    ended = run(program, *arguments, **options)
    assert all(code == 0 for code, _, _ in ended), "\n".join(errors[-2000:] for _, _, errors in ended)
    return [lines for _, lines, _ in ended]
