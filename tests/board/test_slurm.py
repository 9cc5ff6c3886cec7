"""Runs under Slurm, whose commands are small programs of the tests that remember what they were asked."""

from __future__ import annotations

import pathlib

import pytest
from boards import READABLE, client, recipe

from meshtune.board import slurm
from meshtune.board.workspace import Workspace, workspace_at

SBATCH = """#!/bin/sh
for last; do :; done
cp "$last" "$STUB/script"
echo PENDING > "$STUB/state"
echo 4711
"""
SQUEUE = """#!/bin/sh
echo "$*" >> "$STUB/queries"
[ -s "$STUB/state" ] && sed "s/^/4711 /" "$STUB/state"
cat "$STUB/others" 2>/dev/null || true
"""
CALLED = """#!/bin/sh
echo "$(basename "$0") $*" >> "$STUB/called"
"""


@pytest.fixture
def stub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "stub"
    folder.mkdir()
    programs = {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": CALLED, "scontrol": CALLED}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("STUB", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "FRESH_SECONDS", 0.0)
    return folder


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


def test_a_run_is_submitted_watched_and_cancelled(stub: pathlib.Path, workspace: Workspace):
    board = client(workspace)
    assert "slurm" in board.get("/api/machine").json()["schedulers"]
    body = {"recipe": recipe(), "slurm": {"nodes": 2, "gpus": 4, "time": "4:00:00", "partition": "long"}}
    created = board.post("/api/jobs", json=body)
    assert created.status_code == 201, created.text
    assert (created.json()["state"], created.json()["scheduler"]) == (
        "queued", {"name": "slurm", "id": "4711", "reason": ""},
    )  # fmt: skip
    script = (stub / "script").read_text()
    for line in ("--nodes=2", "--gpus-per-node=4", "--time=4:00:00", "--partition=long"):
        assert f"#SBATCH {line}" in script
    assert f"--chdir={workspace.root}" in script
    job = f"/api/jobs/{created.json()['id']}"

    def state() -> str:
        return board.get(job).json()["state"]

    (stub / "state").write_text("PENDING PartitionConfig\n")
    assert board.get(job).json()["scheduler"]["reason"] == "PartitionConfig"
    (stub / "state").write_text("RUNNING None\n")
    assert (state(), board.get(job).json()["scheduler"]["reason"]) == ("running", "")
    (workspace.root / "slurm-4711.out").write_text("a node does not see the model\n")
    assert board.get(f"{job}/log").json()["text"] == "a node does not see the model\n"
    logs = workspace.root / "runs/first/logs"
    logs.mkdir(parents=True)
    (logs / "process-0.log").write_text("update 1\n")
    assert board.get(f"{job}/log").json()["text"] == "update 1\n"
    for _ in range(2):
        assert board.post(f"{job}/stop", json={}).json()["state"] == "stopping"
    assert (stub / "called").read_text().splitlines() == [
        "scontrol update JobId=4711 Requeue=0",
        "scancel --signal=TERM 4711",
    ]
    (stub / "state").write_text("FAILED\n")  # the script's exit code says that its processes were stopped
    assert state() == "stopped"
    (stub / "state").write_text("")  # Slurm has forgotten it
    assert state() == "stopped"
    (workspace.root / "runs/first/run.json").write_text('{"status": "finished"}')
    assert state() == "finished"

    again = board.post(f"{job}/resume", json={})
    assert again.status_code == 200, again.text
    assert "resume=true" in (stub / "script").read_text()
    assert state() == "queued"
    assert board.post(f"{job}/stop", json={}).status_code == 200
    assert (stub / "called").read_text().splitlines()[-1] == "scancel 4711"


def test_all_jobs_are_asked_for_at_once(stub: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurm, "FRESH_SECONDS", 60.0)
    (stub / "others").write_text("".join(f"{number} RUNNING None\n" for number in range(1000)) + "9 PENDING Priority\n")
    queue = slurm.Queue()
    states = {queue.status(str(number)).state for number in range(10, 1000)}
    assert (states, queue.status("9"), queue.status("5000")) == (
        {"RUNNING"}, slurm.Status("PENDING", "Priority"), slurm.Status(""),
    )  # fmt: skip
    assert (stub / "queries").read_text().count("\n") == 1
    (stub / "squeue").write_text("#!/bin/sh\nexit 1\n")
    queue.refresh()
    assert queue.status("9") == slurm.Status(None)


def test_what_slurm_would_refuse_is_refused_before(stub: pathlib.Path, workspace: Workspace, monkeypatch):
    board = client(workspace)

    def refusal(**body: object) -> str:
        answer = board.post("/api/jobs", json={"recipe": recipe(), **body})
        assert answer.status_code == 400
        return answer.json()["problems"][0]["message"]

    assert "not a time" in refusal(slurm={"time": "soon"})
    assert "not a name" in refusal(slurm={"partition": "a\n#SBATCH --evil"})
    assert "not a int" in refusal(slurm={"nodes": "2"})
    assert "options are" in refusal(slurm={"sbatch": "--wrap=ls"})
    assert "move its own work aside" in refusal(slurm={"nodes": 1}, overwrite=True)
    (stub / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    assert "no such partition" in refusal(slurm={"nodes": 1})
    assert board.get("/api/jobs").json()["jobs"] == []
    monkeypatch.setenv("PATH", str(workspace.root))
    assert "no Slurm" in refusal(slurm={"nodes": 1})
