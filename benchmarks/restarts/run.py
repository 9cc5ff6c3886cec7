"""Kills a process of a run in two processes again and again, compares its result with that of a run that was left in
peace, and its goodput with the formula's.

    python benchmarks/restarts/run.py > benchmarks/restarts/result.json
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from meshtune.costs.goodput import goodput
from meshtune.runs.output import read_run
from meshtune.train.report.attempts import ATTEMPTS
from meshtune.train.report.metrics_log import read

MODEL = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"
BETWEEN = (30.0, 60.0)  # seconds from a first update to the kill
UPDATES = int(os.environ.get("UPDATES", "600"))
RECIPE: dict[str, Any] = {
    "model": str(MODEL),
    "train": {"steps": UPDATES, "batch_size": 16, "micro_batch": 8},
    "method": {"kind": "lora", "rank": 8},
    "optimizer": {"learning_rate": 1e-3},
    "checkpoint": {"every": "auto", "mtbf": "45s"},
    "mesh": {"dp": 2},
    "seed": 3,
}


def start(folder: pathlib.Path, name: str, data: pathlib.Path) -> tuple[subprocess.Popen[bytes], pathlib.Path]:
    """The launcher of a run, and its output."""
    output = folder / name
    sections = {"output": str(output), "data": {"train": str(data), "max_length": 64}}
    recipe = folder / f"{name}.yaml"
    recipe.write_text(json.dumps(RECIPE | sections))
    command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", "2", "--restarts", "3", str(recipe)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MESHTUNE_CACHE": str(folder / "cache")}
    log = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=log, env=env), output


def starts_of(output: pathlib.Path) -> list[float]:
    """When each attempt was ready for its first update."""
    return [row["time"] for row in read(output / ATTEMPTS) if row["kind"] == "start"]


class Saves:
    """When each checkpoint was there, as seen by looking again and again."""

    def __init__(self, output: pathlib.Path):
        self._folder, self._there = output / "checkpoints", set[str]()
        self.written: list[tuple[int, float]] = []

    def look(self) -> None:
        """Notes the checkpoints that are new."""
        names = {path.name for path in self._folder.glob("[0-9]*") if path.name.isdigit()}
        self.written += [(int(name), time.time()) for name in names - self._there]
        self._there = names

    def seconds(self, rows: list[dict[str, Any]]) -> float:
        """The median time from the end of the wait for a save until it was written."""
        times = []
        for row in rows:
            seen = [moment for step, moment in self.written if step == row["step"] and moment >= row["time"]]
            if row["kind"] == "save" and seen:
                times.append(min(seen) - row["time"])
        return statistics.median(times)


def kill_at_random(launcher: subprocess.Popen[bytes], output: pathlib.Path, saves: Saves) -> list[tuple[float, float]]:
    """Kills one of the processes BETWEEN seconds after each start until the run ends; the times (of a start, of its
    kill)."""
    numbers, kills = random.Random(0), list[tuple[float, float]]()
    while launcher.poll() is None:
        starts = starts_of(output)
        if len(starts) == len(kills):  # it is starting
            time.sleep(0.2)
            continue
        if _ends_before(launcher, starts[-1] + numbers.uniform(*BETWEEN), saves):
            break
        workers = psutil.Process(launcher.pid).children()
        if len(workers) == 2:
            workers[numbers.randrange(2)].kill()
            kills.append((starts[-1], time.time()))
    return kills


def _ends_before(launcher: subprocess.Popen[bytes], until: float, saves: Saves) -> bool:
    """Waits until a time, by the clock; whether the launcher has ended meanwhile."""
    while time.time() < until:
        if launcher.poll() is not None:
            return True
        saves.look()
        time.sleep(0.05)
    return False


def digest(output: pathlib.Path) -> str:
    """The SHA-256 of the adapter."""
    return hashlib.sha256((output / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def save_cost(output: pathlib.Path) -> tuple[float, float]:
    """(median seconds of updates between saves, median seconds that a save kept them waiting)."""
    intervals, costs = list[float](), list[float]()
    before: dict[str, Any] | None = None
    for row in read(output / ATTEMPTS):
        if before is not None and row["kind"] == before["kind"] == "save":
            useful = row["useful"] - before["useful"]
            intervals.append(useful)
            costs.append(row["time"] - before["time"] - useful)
        before = row
    return statistics.median(intervals), max(0.0, statistics.median(costs))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        data = folder / "stories.jsonl"
        lines = [{"text": f"Story {n}. " + "Once upon a time there was a cat. " * (1 + n % 7)} for n in range(400)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        launcher, output = start(folder, "killed", data)
        saves = Saves(output)
        kills = kill_at_random(launcher, output, saves)
        assert launcher.returncode == 0, (folder / "killed.log").read_text()[-3000:]
        starts = starts_of(output)
        interval, save = save_cost(output)
        mtbf = statistics.mean(killed - started for started, killed in kills)
        restart = statistics.mean(later - killed for later, (_, killed) in zip(starts[1:], kills, strict=True))
        measured = read_run(output)["goodput"]
        # The first start and the rest after the last kill are no part of a cycle: the formula is of whole ones.
        rows = read(output / ATTEMPTS)
        cycles = [row["step"] for row in rows if row["kind"] == "start"]
        useful = _useful(rows)
        wall = starts[-1] - starts[0]
        write = saves.seconds(rows)
        result = {
            "kills": len(kills),
            "seconds_to_a_kill": [round(killed - started, 1) for started, killed in kills],
            "interval": round(interval, 3),
            "save": round(save, 3),
            "write": round(write, 3),
            "restart": round(restart, 2),
            "mtbf": round(mtbf, 1),
            "goodput_between_first_and_last_start": round(useful / wall, 4),
            "goodput_of_the_formula": round(goodput(interval, save, restart, mtbf, write), 4),
            "goodput_if_saves_counted_at_once": round(goodput(interval, save, restart, mtbf), 4),
            "seconds_lost_per_kill": round(mtbf - useful / len(kills), 2),
            "run_json": measured,
            "first_updates_of_attempts": cycles,
            "digest": digest(output),
        }
        print(json.dumps(result), file=sys.stderr, flush=True)
        launcher, peaceful = start(folder, "peaceful", data)
        assert launcher.wait() == 0
        result["equal_bits"] = digest(peaceful) == result["digest"]
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        print(json.dumps({"machine": machine, "updates": UPDATES, **result}, indent=1))


def _useful(rows: list[dict[str, Any]]) -> float:
    """The seconds of updates that later attempts began from: those of all attempts but the last that are kept."""
    total, saves = 0.0, dict[int, float]()
    for row in rows:
        if row["kind"] == "start":
            total += saves.get(row["step"], 0.0)
            saves = {}
        elif row["kind"] == "save":
            saves[row["step"]] = row["useful"]
    return total


if __name__ == "__main__":
    main()
