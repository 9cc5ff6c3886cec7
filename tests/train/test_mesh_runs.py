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
from real_runs import DEVICES, launch, members, order, rows, start_launch, train, updates, wait_until, weights

from meshtune.train.report.metrics_log import TIMINGS

# As in test_mesh_trajectories: sums are added in another order on every mesh, some 1e-7 an update.
CLOSE = 2e-6  # relative, of losses and gradient norms
WEIGHTS = 1e-4  # norm of the difference over the norm of what was learned, a tensor
LOST = 75  # another process was lost, the same command resumes
SCRIPT = pathlib.Path(__file__).with_name("run_and_die.py")
MODEL = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"

LORA: dict[str, Any] = {"method": {"kind": "lora", "rank": 8}, "optimizer": {"learning_rate": 1e-3}}
FULL: dict[str, Any] = {"method": "full", "optimizer": {"learning_rate": 3e-4}, "data": {"packing": False}}


def write(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    """The path of a recipe whose run goes to `folder`/run unless output says otherwise."""
    real_runs.write_stories(folder / "stories.jsonl", sections.pop("stories", 96))
    fields = {
        "model": str(MODEL),
        "data": {"train": str(folder / "stories.jsonl"), "max_length": 64, **sections.pop("data", {})},
        "train": {"steps": 30, "batch_size": 16, "micro_batch": 8, **sections.pop("train", {})},
        "output": str(folder / "run"),
        "seed": 3,
        **sections,
    }
    path = folder / "recipe.yaml"  # JSON is YAML
    path.write_text(json.dumps(fields))
    return path


def check_near(actual: pathlib.Path, expected: pathlib.Path, count: int) -> None:
    """Two runs made the same updates of the same rows, up to the order in which floats were added."""
    ours, theirs = updates(actual), updates(expected)
    assert len(theirs) == count
    assert order(ours) == order(theirs)
    assert len({row["tokens"] for row in theirs}) > 2, "updates that are all alike would hide another order"
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in ours], [row[key] for row in theirs], rtol=CLOSE, err_msg=key)
    learned, reference = weights(actual), weights(expected)
    assert learned.keys() == reference.keys()
    for name, value in reference.items():
        difference = np.linalg.norm(learned[name] - value) / np.linalg.norm(value)
        assert difference < WEIGHTS, f"{name}: {difference:.1e}"


@pytest.mark.slow
def test_a_run_moves_from_eight_devices_to_four(tmp_path: pathlib.Path):
    """Stopped by SIGTERM after update 4, 5 or 6 (the update under way is finished), and resumed on another mesh."""
    path = write(tmp_path, **LORA, train={"steps": 8})
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
    check_near(moved, tmp_path / "whole", 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sections", "mesh"),
    [(LORA, ("mesh.fsdp=4", "mesh.tp=2")), (FULL, ("mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"))],
    ids=["lora packed", "full padded"],
)
def test_one_two_and_four_processes_train_as_one_device_does(tmp_path: pathlib.Path, sections, mesh):
    """Eight devices in all."""
    path = write(tmp_path, **sections)
    train(path, f"output={tmp_path / 'alone'}")
    losses = [row["loss"] for row in updates(tmp_path / "alone")]
    assert losses[-1] < losses[0] - 0.3, "nothing was learned, so nothing was compared"
    for processes in (1, 2, 4):
        output = tmp_path / f"{processes}-processes"
        launch(path, processes, 8 // processes, *mesh, f"output={output}")
        check_near(output, tmp_path / "alone", 30)


UPDATES = 24
SAVED = LORA | {"checkpoint": {"every": 4, "keep": 2}, "train": {"steps": UPDATES}, "mesh": {"fsdp": 4}}


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run on two processes of two devices, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    launch(write(folder, **SAVED), 2, 2)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_the_rerun_is_exact(
    tmp_path: pathlib.Path, reference_run: pathlib.Path, victim
):
    """Started one by one as a scheduler does; two devices each, parameters split over both."""
    path, run = write(tmp_path, **SAVED), tmp_path / "run"
    with members(path, 2, 2, "--resume") as processes:
        wait_until(lambda: len(rows(run)) >= 10, lambda: processes[victim][0].poll() is None)
        os.kill(processes[victim][0].pid, signal.SIGKILL)
        began = time.monotonic()
        left, log = processes[1 - victim]
        code = left.wait(60)
        print(f"the other left after {time.monotonic() - began:.1f} s")
    text = log.read_text()
    assert code == LOST, text
    assert f"error: process {victim} of 2 on " in text
    assert " was lost: " in text
    assert len(rows(run)) < UPDATES, "it was to be killed in the middle"
    assert not (run / "adapter").exists()
    with members(path, 2, 2, "--resume") as processes:
        assert [process.wait(600) for process, _ in processes] == [0, 0], processes[0][1].read_text()
        assert "resuming after update" in processes[0][1].read_text()
    exact(run, reference_run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_launch_with_a_killed_process_says_so_and_goes_on_exactly(
    tmp_path: pathlib.Path, reference_run: pathlib.Path
):
    path, run = write(tmp_path, **SAVED), tmp_path / "run"
    with start_launch(path, 2, 2, "--resume") as job:
        wait_until(lambda: len(rows(run)) >= 14, lambda: job.launcher.poll() is None)
        job.members()[1].kill()
        code, output = job.ends(60)
    assert code == LOST, output
    assert "process 1 of 2 was ended by SIGKILL" in output
    assert "error: process 1 of 2 on " in (run / "logs/process-0.log").read_text()
    assert len(rows(run)) < UPDATES, "it was to be killed in the middle"
    launch(path, 2, 2, "--resume")
    exact(run, reference_run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_launch_killed_in_the_middle_of_a_save_goes_on_exactly_from_the_one_before(
    tmp_path: pathlib.Path, reference_run: pathlib.Path
):
    """Process 1 is killed as soon as the second checkpoint's unfinished directory is seen."""
    path, run = write(tmp_path, **SAVED), tmp_path / "run"
    saved = run / "checkpoints"
    with start_launch(path, 2, 2, "--resume") as job:
        wait_until(lambda: len(rows(run)) >= 5, lambda: job.launcher.poll() is None)
        victim = job.members()[1]
        wait_until(lambda: list(saved.glob("8.*-tmp*")), lambda: job.launcher.poll() is None)
        victim.kill()
        code, output = job.ends(60)
    assert code == LOST, output
    left = {file.name for file in saved.iterdir()}
    assert "4" in left
    assert "8" not in left, "it was to be killed before the save was whole"
    launch(path, 2, 2, "--resume")
    assert "resuming after update 4" in (run / "logs/process-0.log").read_text()
    exact(run, reference_run)


def exact(actual: pathlib.Path, expected: pathlib.Path) -> None:
    """Bit for bit the same run: every number of every update, and the result."""
    ours, theirs = (
        [{key: value for key, value in row.items() if key not in TIMINGS} for row in updates(output)]
        for output in (actual, expected)
    )
    assert len(theirs) == UPDATES
    assert ours == theirs
    learned, reference = weights(actual), weights(expected)
    assert learned.keys() == reference.keys()
    for name, value in reference.items():
        np.testing.assert_array_equal(learned[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_on_one_stream_train_as_one_and_go_on_exactly_when_killed(tmp_path: pathlib.Path):
    """The journal of the stream is written every 16 updates, checkpoints every 8: a process is killed beyond both.

    There are enough stories for a lane for each row, and for workers (MESHTUNE_DATA_PROCESSES)."""
    stream = SAVED | {"data": {"streaming": True}, "checkpoint": {"every": 8}, "stories": 4200}
    folders = {name: tmp_path / name for name in ("alone", "whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    paths = {name: write(folder, **stream) for name, folder in folders.items()}
    alone = {name: value for name, value in stream.items() if name != "mesh"}
    train(write(folders["alone"], **alone))
    launch(paths["whole"], 2, 2)
    check_near(folders["whole"] / "run", folders["alone"] / "run", UPDATES)
    journals = {file.name for file in (folders["whole"] / "run").glob("stream*")}
    assert journals == {"stream-0.jsonl", "stream-4.jsonl"}, "each process was to read its rows alone"
    run = folders["killed"] / "run"
    with start_launch(paths["killed"], 2, 2, "--resume", MESHTUNE_DATA_PROCESSES="4") as job:
        wait_until(lambda: len(rows(run)) >= 19, lambda: job.launcher.poll() is None)
        job.members()[1].kill()
        code, output = job.ends(60)
    assert code == LOST, output
    assert 16 < len(rows(run)) < UPDATES, "it was to be killed in the middle"
    launch(paths["killed"], 2, 2, "--resume")
    assert "resuming after update 16" in (run / "logs/process-0.log").read_text()
    exact(run, folders["whole"] / "run")
