"""Starts runs as a user does, `meshtune train` and `meshtune launch local`, and reads what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

DEVICES = "--xla_force_host_platform_device_count"
# Simulated devices share few cores: one that has to wait long for its turn is not a device that hangs.
PATIENCE = " ".join(f"--xla_cpu_collective_call_{event}_timeout_seconds=600" for event in ("warn_stuck", "terminate"))
# What must not depend on devices and processes, exactly: which rows an update has (their tokens, and those learned).
ORDER = ("step", "epoch", "tokens", "learned_tokens", "learning_rate")


def environment(cache: pathlib.Path, **overrides: str) -> dict[str, str]:
    """Of a process of the tests: the CPU, patient with slow machines, and a separate cache of prepared data."""
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": PATIENCE, "MESHTUNE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return os.environ | settings | overrides


def write_stories(path: pathlib.Path, count: int = 96, lengths: tuple[int, int] = (4, 30)) -> None:
    """Short texts of different lengths, so that no two updates have equally many tokens to learn."""
    rng = random.Random(0)
    parts = ["Tom", "Lily", "the dog", "a big tree", "went home", "was happy", "saw a cake", "in the park", "and then"]
    lines = [" ".join(rng.choice(parts) for _ in range(rng.randint(*lengths))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": f"Once upon a time {line}."}) + "\n" for line in lines))


def train(recipe: pathlib.Path, *arguments: str, devices: int = 1, timeout: float = 300) -> None:
    """`meshtune train` in one process with `devices` simulated devices. AssertionError if it fails."""
    env = environment(recipe.parent / "cache")
    env["XLA_FLAGS"] += f" {DEVICES}={devices}"
    command = [sys.executable, "-m", "meshtune", "train", str(recipe), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def launch(recipe: pathlib.Path, processes: int, devices: int, *arguments: str, timeout: float = 600) -> None:
    """`meshtune launch local`. AssertionError if it fails."""
    with start_launch(recipe, processes, devices, *arguments) as job:
        code, output = job.ends(timeout)
        assert code == 0, output[-6000:]


@dataclasses.dataclass
class Launched:
    """A job of `meshtune launch local` that runs. `peaks[n]` is the most memory process n has held so far, in bytes."""

    launcher: subprocess.Popen[bytes]
    processes: int
    screen: pathlib.Path
    peaks: dict[int, int] = dataclasses.field(default_factory=dict)

    def members(self) -> dict[int, psutil.Process]:
        """The processes of the run, by number."""
        by_number = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):  # not yet the process that it was forked for
                    by_number[int(child.environ()["MESHTUNE_PROCESS"])] = child
        return by_number

    def ends(self, timeout: float) -> tuple[int, str]:
        """(exit code, everything shown) once it has ended."""
        code = self.launcher.wait(timeout)
        return code, self.screen.read_text(errors="replace")

    def watch(self) -> None:
        """Follows the processes' memory until they end."""
        known: dict[int, psutil.Process] = {}
        while self.launcher.poll() is None:
            if len(known) < self.processes:
                known |= self.members()
            for number, process in known.items():
                self.peaks[number] = max(self.peaks.get(number, 0), high_water(process.pid))
            time.sleep(0.1)


def high_water(pid: int) -> int:
    """The most a process has held since its program was started, as the kernel counts it; 0 if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as lines:
        for line in lines:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def start_launch(recipe: pathlib.Path, processes: int, devices: int, *arguments: str, **env: str) -> Iterator[Launched]:
    """A running `meshtune launch local`, ended with everything it started when the block is left."""
    command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", str(processes), "-d", str(devices)]
    screen = recipe.parent / f"screen-{time.monotonic_ns()}.txt"
    with screen.open("wb") as out:
        launcher = subprocess.Popen(
            [*command, str(recipe), *arguments],
            env=environment(recipe.parent / "cache", **env),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    job = Launched(launcher, processes, screen)
    watching = threading.Thread(target=job.watch, daemon=True)
    watching.start()
    try:
        yield job
    finally:
        for process in [*job.members().values(), psutil.Process(launcher.pid)] if launcher.poll() is None else []:
            with contextlib.suppress(psutil.Error):
                process.kill()
        launcher.wait()
        watching.join()


@contextlib.contextmanager
def members(
    recipe: pathlib.Path, processes: int, devices: int, *arguments: str
) -> Iterator[list[tuple[subprocess.Popen[bytes], pathlib.Path]]]:
    """The processes of one run as a scheduler starts them, each by itself, with the file of its output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running: list[tuple[subprocess.Popen[bytes], pathlib.Path]] = []
    try:
        for number in range(processes):
            place = {"MESHTUNE_COORDINATOR": address, "MESHTUNE_PROCESSES": str(processes)}
            env = environment(recipe.parent / "cache", MESHTUNE_PROCESS=str(number), **place)
            env["XLA_FLAGS"] += f" {DEVICES}={devices}"
            log = recipe.parent / f"member-{number}-{time.monotonic_ns()}.txt"
            with log.open("wb") as out:
                command = [sys.executable, "-m", "meshtune", "train", str(recipe), *arguments]
                process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
            running.append((process, log))
        yield running
    finally:
        for process, _ in running:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], Any], goes_on: Callable[[], bool], timeout: float = 300) -> None:
    """Waits until `condition()` is true; AssertionError if the run ends before, or after `timeout` seconds."""
    until = time.monotonic() + timeout
    while not condition():
        assert goes_on(), "the run ended before it came so far"
        assert time.monotonic() < until, f"it did not come so far in {timeout:.0f} s"
        time.sleep(0.002)


def rows(output: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; those that are being written are left out."""
    file = output / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def updates(output: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of training, one an update from the first on."""
    train_rows = [row for row in rows(output) if row["kind"] == "train"]
    assert [row["step"] for row in train_rows] == list(range(1, len(train_rows) + 1)), (
        "an update is missing or is there twice"
    )
    return train_rows


def order(train_rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns the fields that tell which data each update used."""
    return [tuple(row[key] for key in ORDER) for row in train_rows]


def weights(output: pathlib.Path) -> dict[str, np.ndarray]:
    """Every tensor of the adapter or model that a run wrote."""
    files = sorted([*output.glob("adapter/*.safetensors"), *output.glob("model/*.safetensors")])
    assert files, f"{output} has no result"
    return {name: value for file in files for name, value in load_file(file).items()}
