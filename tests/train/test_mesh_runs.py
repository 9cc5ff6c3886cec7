"""The same run on other devices and processes, moved between them, and killed: real commands, a tiny real model."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import real_runs
from real_runs import DEVICES, launch, launched, members, order, rows, train, updates, wait_until, weights

# As in test_mesh_trajectories: sums are added in another order on every mesh, some 1e-7 an update.
CLOSE = 2e-6  # relative, of losses and gradient norms
WEIGHTS = 1e-4  # norm of the difference over the norm of what was learned, a tensor
LOST = 75  # another process was lost, the same command resumes
SCRIPT = pathlib.Path(__file__).with_name("run_and_die.py")
MODEL = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"

LORA: dict[str, Any] = {"method": {"kind": "lora", "rank": 8}, "optimizer": {"learning_rate": 1e-3}}
FULL: dict[str, Any] = {"method": "full", "optimizer": {"learning_rate": 3e-4}, "data": {"packing": False}}


@pytest.fixture
def recipe(tmp_path: pathlib.Path):
    """recipe(**sections) is the path of a recipe whose run goes to `tmp_path`/run unless output says otherwise."""
    real_runs.write_stories(tmp_path / "stories.jsonl")

    def write(**sections: Any) -> pathlib.Path:
        fields = {
            "model": str(MODEL),
            "data": {"train": str(tmp_path / "stories.jsonl"), "max_length": 64, **sections.pop("data", {})},
            "train": {"steps": 30, "batch_size": 16, "micro_batch": 8, **sections.pop("train", {})},
            "output": str(tmp_path / "run"),
            "seed": 3,
            **sections,
        }
        path = tmp_path / "recipe.yaml"  # JSON is YAML
        path.write_text(json.dumps(fields))
        return path

    return write


def same(found: pathlib.Path, expected: pathlib.Path, count: int) -> None:
    """Two runs made the same updates of the same rows, up to the order in which floats were added."""
    ours, theirs = updates(found), updates(expected)
    assert len(theirs) == count
    assert order(ours) == order(theirs)
    assert len({row["tokens"] for row in theirs}) > 2, "updates that are all alike would hide another order"
    for what in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[what] for row in ours], [row[what] for row in theirs], rtol=CLOSE, err_msg=what)
    learned, reference = weights(found), weights(expected)
    assert learned.keys() == reference.keys()
    for name, value in reference.items():
        difference = np.linalg.norm(learned[name] - value) / np.linalg.norm(value)
        assert difference < WEIGHTS, f"{name}: {difference:.1e}"


def test_a_run_moves_from_eight_devices_to_four(recipe, tmp_path: pathlib.Path):
    """Stopped by SIGTERM after update 4, 5 or 6 (what was under way is finished), and resumed on another mesh."""
    path = recipe(**LORA, train={"steps": 8})
    train(path, f"output={tmp_path / 'whole'}")
    moved = tmp_path / "moved"
    fields = json.loads(path.read_text()) | {"output": str(moved), "mesh": {"fsdp": 8}}
    stopped = tmp_path / "stopped.json"
    stopped.write_text(json.dumps(fields))
    env = real_runs.environment(tmp_path / "cache")
    env["XLA_FLAGS"] += f" {DEVICES}=8"
    died = subprocess.run([sys.executable, SCRIPT, stopped, "term:4"], env=env, capture_output=True, text=True)
    assert died.returncode == 128 + signal.SIGTERM, died.stdout + died.stderr
    done = len(updates(moved))
    assert 4 <= done <= 6
    assert json.loads((moved / "run.json").read_text())["status"] == "interrupted"
    train(path, "--resume", f"output={moved}", "mesh.fsdp=2", "mesh.tp=2", devices=4)
    same(moved, tmp_path / "whole", 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sections", "mesh"),
    [(LORA, ("mesh.fsdp=4", "mesh.tp=2")), (FULL, ("mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"))],
    ids=["lora packed", "full padded"],
)
def test_one_two_and_four_processes_train_as_one_device_does(recipe, tmp_path: pathlib.Path, sections, mesh):
    """Eight devices in all."""
    path = recipe(**sections)
    train(path, f"output={tmp_path / 'alone'}")
    losses = [row["loss"] for row in updates(tmp_path / "alone")]
    assert losses[-1] < losses[0] - 0.3, "nothing was learned, so nothing was compared"
    for processes in (1, 2, 4):
        output = tmp_path / f"{processes}-processes"
        launch(path, processes, 8 // processes, *mesh, f"output={output}")
        same(output, tmp_path / "alone", 30)


SAVED = {"checkpoint": {"every": 5, "keep": 2}, "train": {"steps": 60}, "mesh": {"fsdp": 4}}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_the_rerun_is_exact(recipe, tmp_path: pathlib.Path, victim: int):
    """Started one by one as a scheduler does; two devices each, parameters split over both."""
    path = recipe(**LORA | SAVED)
    whole, killed = tmp_path / "whole", tmp_path / "run"
    with members(path, 2, 2, f"output={whole}") as processes:
        assert [process.wait(300) for process, _ in processes] == [0, 0], processes[0][1].read_text()
    with members(path, 2, 2, "--resume") as processes:
        wait_until(lambda: len(rows(killed)) >= 17, lambda: processes[victim][0].poll() is None)
        os.kill(processes[victim][0].pid, signal.SIGKILL)
        began = time.monotonic()
        left, said = processes[1 - victim]
        code = left.wait(60)
        seconds = time.monotonic() - began
    text = said.read_text()
    assert code == LOST, text
    assert f"error: process {victim} of 2 on " in text
    assert " was lost: " in text
    assert len(rows(killed)) < 60, "it was to be killed in the middle"
    assert not (killed / "adapter").exists()
    print(f"the other left after {seconds:.1f} s")
    with members(path, 2, 2, "--resume") as processes:
        assert [process.wait(300) for process, _ in processes] == [0, 0], processes[0][1].read_text()
        assert "resuming after update" in processes[0][1].read_text()
    exact(killed, whole)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_launch_with_a_killed_process_says_so_and_goes_on_exactly(recipe, tmp_path: pathlib.Path):
    path = recipe(**LORA | SAVED)
    launch(path, 2, 2, f"output={tmp_path / 'whole'}")
    run = tmp_path / "run"
    with launched(path, 2, 2, "--resume") as job:
        wait_until(lambda: len(rows(run)) >= 23, lambda: job.launcher.poll() is None)
        job.members()[1].kill()
        code, said = job.ends(60)
    assert code == 128 + signal.SIGKILL, said
    assert "process 1 of 2 was ended by SIGKILL" in said
    assert "process 1 of 2 on " in (run / "logs/process-0.log").read_text()
    launch(path, 2, 2, "--resume")
    exact(run, tmp_path / "whole")


def exact(found: pathlib.Path, expected: pathlib.Path) -> None:
    """Bit for bit the same run: every number of every update, and the result."""
    times = ("seconds", "tokens_per_second", "memory", "machine")
    ours, theirs = (
        [{key: value for key, value in row.items() if key not in times} for row in updates(output)]
        for output in (found, expected)
    )
    assert ours == theirs
    learned, reference = weights(found), weights(expected)
    assert learned.keys() == reference.keys()
    for name, value in reference.items():
        np.testing.assert_array_equal(learned[name], value, err_msg=name)
