"""Restarts of runs in two processes: what they compile, and what a launcher that restarts does."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys

import pytest

from meshtune.launch import local
from meshtune.launch.local import launch_again, newest_checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "mesh"))
import job as mesh_job

# Counts what JAX is asked to compile and what it reads from its cache, and the seconds of both.
COUNTING = """
import json, sys
import jax
from meshtune.cli.main import main

counts = {}

def count(event, **_):
    counts[event.rpartition("/")[2]] = counts.get(event.rpartition("/")[2], 0) + 1

def add(event, seconds, **_):
    counts[event.rpartition("/")[2]] = counts.get(event.rpartition("/")[2], 0.0) + seconds

jax.monitoring.register_event_listener(count)
jax.monitoring.register_event_duration_secs_listener(add)
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
print(json.dumps({"counts": counts}))
"""
SETTINGS = [
    "mesh.dp=2",
    "data.max_length=64",
    "train.batch_size=4",
    "optimizer.learning_rate=1e-3",
    "optimizer.warmup_ratio=0",
]
SETTINGS += ["method.rank=2", "checkpoint.every=2", "train.steps=4"]


def data_file(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"once upon a time {n}"}) + "\n" for n in range(64)))
    return path


def run_counting(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, float]]:
    """The counts of both processes."""
    folder.mkdir()
    script = folder / "counting.py"
    script.write_text(COUNTING)
    monkeypatch.setattr(mesh_job, "JOB_PROCESS", script)
    exits = mesh_job.Processes(folder, "train", *arguments).exits(400)
    assert all(process.code == 0 for process in exits), exits[0].errors[-3000:] + exits[1].errors[-3000:]
    return [process.value("counts") for process in exits]


def compiled(counts: dict[str, float]) -> float:
    """The number of programs that were not in the cache."""
    return counts["compile_requests_use_cache"] - counts.get("cache_hits", 0)


@pytest.mark.slow
def test_a_second_start_of_two_processes_compiles_nothing(stories260k, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))]:
        monkeypatch.delenv(name)
    output = tmp_path / "run"
    source = f"data.train=[{{path: {data_file(tmp_path)}}}]"
    arguments = [f"model={stories260k}", source, f"output={output}", "stage.kind=pt", *SETTINGS]
    first = run_counting(tmp_path / "first", monkeypatch, *arguments)
    assert compiled(first[0]) > 20
    shutil.rmtree(output / "checkpoints" / "4")
    second = run_counting(tmp_path / "second", monkeypatch, *arguments, "resume=true")
    assert compiled(second[0]) == 0
    # JAX lets only process 0 write. On GPUs the others read its programs (JAX leaves the devices out of their keys); on
    # CPUs keys differ between processes, so that process 1 compiles each program again.
    assert compiled(second[1]) == compiled(first[1])


class Command:
    def __init__(self, output: pathlib.Path):
        self.output = output


def test_a_restart_counts_only_if_no_newer_checkpoint_came_of_it(tmp_path, monkeypatch, capsys):
    """Attempts reach 3, 7, 7 (fruitless), 9 and 9, 9, 9: three without progress in a row are one too many of two."""
    reached, started = iter([3, 7, 7, 9, 9, 9, 9, 11]), []

    def attempt(command, processes, devices, console) -> int:
        step = next(reached)
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        started.append(step)
        return 75

    monkeypatch.setattr(local, "launch", attempt)
    printed = []
    console = type("Console", (), {"print": lambda self, text, **_: printed.append(text)})()
    assert launch_again(Command(tmp_path), 2, None, 2, console) == 75
    assert started == [3, 7, 7, 9, 9, 9, 9]
    assert newest_checkpoint(tmp_path) == 9
    assert printed[-1] == "no newer checkpoint came of 2 restarts: giving up"
