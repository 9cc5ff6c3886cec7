"""Runs of two processes on the two nodes of a real Slurm, submitted, watched and stopped through the board."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from boards import READABLE, client, recipe, wait
from slurm_nodes import two_nodes

from meshtune.board.workspace import Workspace, workspace_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 400


@pytest.fixture
def workspace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    with two_nodes(tmp_path / "slurm") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield workspace_at(tmp_path / "root", READABLE)


def test_a_run_on_two_nodes_is_stopped_and_goes_on_while_another_waits(workspace: Workspace):
    board = client(workspace)

    def submit(output: str, nodes: int) -> str:
        text = recipe(output, steps=STEPS, extra="mesh: {dp: 2}\n")
        answer = board.post("/api/jobs", json={"recipe": text, "slurm": {"nodes": nodes, "gpus": 0, "time": "20"}})
        assert answer.status_code == 201, answer.text
        return f"/api/jobs/{answer.json()['id']}"

    def job(path: str) -> dict[str, Any]:
        return board.get(path).json()

    def steps(path: str) -> list[int]:
        return [row["step"] for row in board.get(f"{path}/metrics").json()["rows"] if row["kind"] == "train"]

    first = submit("runs/first", nodes=2)
    wait(lambda: steps(first) or job(first)["state"] == "failed", 240)
    assert job(first)["state"] == "running", job(first)["reason"]
    waiting = submit("runs/waiting", nodes=3)
    wait(lambda: "Partition" in job(waiting)["scheduler"]["reason"], 60)  # Slurm's words differ between its versions
    assert job(waiting)["state"] == "queued"
    assert board.post(f"{waiting}/stop", json={}).status_code == 200
    wait(lambda: job(waiting)["state"] == "stopped", 60)
    assert board.post(f"{first}/stop", json={}).json()["state"] == "stopping"
    wait(lambda: job(first)["state"] == "stopped", 120)
    saved = max(steps(first))
    assert saved < STEPS, "it was too quick to be stopped"

    assert board.post(f"{first}/resume", json={}).json()["state"] == "queued"
    wait(lambda: job(first)["state"] in ("finished", "failed"), 300)
    assert job(first)["state"] == "finished", job(first)["reason"]
    assert steps(first) == list(range(1, STEPS + 1))  # none was lost or made twice
    log = board.get(f"{first}/log").json()["text"]
    assert "2 devices, 2 processes" in log
    assert f"resuming after update {saved}" in log
