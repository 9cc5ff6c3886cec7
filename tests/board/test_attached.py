"""Runs that were started without the board: shown while they run, then resumed, branched and compared like others."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import subprocess
import sys

import pytest
from boards import READABLE, client, recipe, wait

from meshtune.board.workspace import workspace_at
from meshtune.config.load import load_recipe
from meshtune.runs.output import LOCK, is_claimed
from meshtune.train.run import train

RUN = "runs/mine"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """A directory with a run of four updates that has ended."""
    root = tmp_path_factory.mktemp("root")
    (root / "recipe.yaml").write_text(recipe(RUN, steps=4, extra="log: {every: 1}\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        train(load_recipe("recipe.yaml"))
    return root


@pytest.fixture(scope="module")
def stopped_root(tmp_path_factory) -> pathlib.Path:
    """A directory with a run of the command line that was stopped after four of its updates."""
    root = tmp_path_factory.mktemp("root")
    (root / "recipe.yaml").write_text(recipe(RUN, steps=100000, extra="checkpoint: {every: 4}\nlog: {every: 1}\n"))
    command = [sys.executable, "-m", "meshtune", "train", "recipe.yaml"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        board = client(workspace_at(root, READABLE))
        wait(lambda: (root / RUN / "checkpoints/4").is_dir(), 120)
        job = board.post("/api/jobs/attach", json={"output": RUN}).json()
        assert (job["state"], job["kind"], job["attached"]) == ("running", "train", True)
        assert "end it where it was started" in board.post(f"/api/jobs/{job['id']}/stop", json={}).text
        process.terminate()
    assert process.returncode == 143
    return root


@pytest.fixture
def board(root: pathlib.Path):
    return client(workspace_at(root, READABLE))


def attach_run(board) -> dict:
    return board.post("/api/jobs/attach", json={"output": RUN}).json()


def test_a_run_is_attached_once_and_shows_what_it_wrote(board):
    job = attach_run(board)
    assert job["attached"] is False, "it has ended, and can be gone on with as one of the board's"
    assert attach_run(board)["id"] == job["id"]
    assert [listed["id"] for listed in board.get("/api/jobs").json()["jobs"]] == [job["id"]]
    assert job["state"] == "finished"
    shown = board.get(f"/api/jobs/{job['id']}").json()
    assert 4 in shown["checkpoints"]
    assert shown["report"]
    assert "meshtune train" in shown["command"]
    assert board.get(f"/api/jobs/{job['id']}/metrics").json()["rows"]
    assert "trainable" in board.get(f"/api/jobs/{job['id']}/log").json()["text"]
    assert "steps: 4" in board.get(f"/api/jobs/{job['id']}/recipe").json()["recipe"]
    assert board.get("/api/compare", params={"job": job["id"]}).json()["runs"][0]["figures"]["step"] >= 4


def test_a_run_is_removed_from_the_list_and_not_from_the_disk(board, root: pathlib.Path):
    job = attach_run(board)
    assert board.post(f"/api/jobs/{job['id']}/remove", json={}).status_code == 200
    assert (root / RUN / "run.json").is_file()


@pytest.mark.slow
def test_a_run_goes_on_as_one_of_the_board(stopped_root: pathlib.Path):
    board = client(workspace_at(stopped_root, READABLE))
    job = attach_run(board)
    assert job["state"] == "stopped"
    step = json.loads((stopped_root / RUN / "run.json").read_text())["step"]
    resumed = board.post(f"/api/jobs/{job['id']}/resume", json={}).json()
    assert (resumed["state"], resumed["attached"]) == ("running", False)
    wait(lambda: (board.get(f"/api/jobs/{job['id']}").json()["progress"].get("step") or 0) > step, 120)
    board.post(f"/api/jobs/{job['id']}/stop", json={})
    wait(lambda: board.get(f"/api/jobs/{job['id']}").json()["state"] == "stopped", 120)
    assert json.loads((stopped_root / RUN / "run.json").read_text())["step"] > step


def test_what_is_no_run_is_refused(board, root: pathlib.Path):
    (root / "empty").mkdir()
    for output, problem in (("empty", "there is no run"), ("/etc", "outside"), ("", "it is empty")):
        answer = board.post("/api/jobs/attach", json={"output": output})
        assert answer.status_code == 400
        assert problem in answer.text


def test_a_run_that_was_killed_is_lost(tmp_path: pathlib.Path):
    output = tmp_path / "runs/killed"
    output.mkdir(parents=True)
    (output / "run.json").write_text(json.dumps({"status": "running"}))
    board = client(workspace_at(tmp_path, READABLE))
    job = board.post("/api/jobs/attach", json={"output": "runs/killed"}).json()
    assert job["state"] == "lost"
    descriptor = os.open(output / LOCK, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert is_claimed(output)
    assert board.get(f"/api/jobs/{job['id']}").json()["state"] == "running"
    assert "end it where it was started" in board.post(f"/api/jobs/{job['id']}/stop", json={}).text
    os.close(descriptor)
    assert not is_claimed(output)
