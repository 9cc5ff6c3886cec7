"""The board's API: who may call it, what it refuses, and what hostile names and files do."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest
from boards import ADDRESS, READABLE, TOKEN, client, recipe, request, wait

from meshtune.board import queue
from meshtune.board.job import replace_json
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.errors import UserError

HOSTILE = "<img src=x onerror=alert(1)>\n<script>alert(2)</script>"


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


@pytest.fixture
def board(workspace):
    return client(workspace)


def problems(answer) -> dict[str, str]:
    assert answer.status_code == 400, answer.text
    return {problem["path"]: problem["message"] for problem in answer.json()["problems"]}


def ended_job(workspace: Workspace, **fields):
    job = queue.add(workspace, request(workspace, "version", **fields))
    wait(lambda: queue.find(workspace, job.id).state == "finished")
    return job


def test_the_page_and_its_headers(board):
    answer = board.get("/")
    assert "<title>Meshtune</title>" in answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert board.get("/views/runs.js").headers["content-type"].startswith("text/javascript")
    assert board.get("/../app.py").status_code == 404
    assert board.get("/%2e%2e/app.py").status_code == 404
    missing = board.get("/api/nothing")
    assert missing.status_code == 404


def test_every_reading_and_change_needs_the_token(workspace):
    board = client(workspace, token=TOKEN, cookie="meshtune-7860")
    assert board.get("/").status_code == 200
    for path in ("/api/jobs", "/api/machine", "/api/events", "/api/jobs/00001-x/log"):
        assert board.get(path).status_code == 401
    assert board.post("/api/jobs", json={}).status_code == 401
    assert board.get("/api/jobs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert board.post("/api/session", json={"token": "wrong"}).status_code == 401
    signed_in = board.post("/api/session", json={"token": TOKEN})
    cookie = signed_in.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert board.get("/api/jobs").status_code == 200
    linked = client(workspace, token=TOKEN, cookie="meshtune-7860")
    assert linked.get("/sign-in", params={"token": TOKEN}).url.path == "/"
    assert linked.get("/api/jobs").status_code == 200


def test_pages_of_other_sites_are_refused(board):
    assert board.get("/api/jobs", headers={"host": "evil.example:7860"}).status_code == 403
    assert board.post("/api/jobs", json={}, headers={"origin": "http://evil.example"}).status_code == 403
    assert board.post("/api/jobs", json={}, headers={"origin": ADDRESS}).status_code == 400
    form = board.post("/api/jobs", content=json.dumps({}), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    assert board.post("/api/jobs", data={"a": "b"}).status_code == 415


def test_what_is_wrong_with_a_recipe_stands_beside_its_key(board):
    answer = board.post("/api/check", json={"recipe": recipe(extra="trian: 3\noptimizer: {learning_rate: fast}\n")})
    wrong = problems(answer)
    assert set(wrong) == {"trian", "optimizer.learning_rate"}
    assert "did you mean 'train'?" in wrong["trian"]
    assert problems(board.post("/api/check", json={"recipe": "a: [1"})).keys() == {"recipe.yaml, line 1, column 6"}
    assert problems(board.post("/api/check", json={"kind": "nonsense"})).keys() == {"kind"}
    assert problems(board.post("/api/check", json={"recipe": 3})).keys() == {"recipe"}
    fine = board.post("/api/check", json={"recipe": recipe()}).json()
    assert fine["problems"] == []
    assert fine["command"].endswith("train recipe.yaml")


def test_paths_stay_inside_the_roots(board, workspace, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (workspace.root / "link").symlink_to(secret)
    for output in ("/etc/run", "../run", "link/run", ".", "meshtune-board/x"):
        assert problems(board.post("/api/check", json={"recipe": recipe(output)})).keys() == {"output"}
    outside = recipe().replace(str(READABLE[0] / "model"), str(secret))
    assert problems(board.post("/api/check", json={"recipe": outside})).keys() == {"model.path"}
    for text in ("../secret", "a/../../secret", "link", "~root", "/etc/passwd", "\0"):
        with pytest.raises(UserError):
            workspace.to_read(text)
    assert workspace.to_read(str(READABLE[0] / "model")).is_dir()
    with pytest.raises(UserError, match="outside of"):
        workspace.to_write(str(READABLE[0] / "model"))


def test_bodies_that_are_no_requests(board):
    headers = {"content-type": "application/json"}
    for content in (b"[1]", b"{", b"\xff", b"[" * 100_000):
        assert board.post("/api/jobs", content=content, headers=headers).status_code == 400
    assert board.post("/api/jobs", content=b"{" + b" " * 5_000_000, headers=headers).status_code == 413
    for path in ("/api/jobs/..%2f..%2fetc", "/api/jobs/00001-none", "/api/jobs/%00/log", "/api/events?job=x"):
        assert board.get(path).status_code == 404


def test_hostile_names_and_logs_are_data(board, workspace):
    output = workspace.root / "runs/evil"
    job = ended_job(workspace, name=HOSTILE, output=str(output))
    assert job.id == "00001-img-src-x-onerror-alert-1-script-alert-2"[: len(job.id)]
    (job.folder / "log.txt").write_text(HOSTILE)
    output.mkdir(parents=True)
    (output / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "text": HOSTILE}) + "\n")
    (output / "metrics.jsonl").write_text(
        json.dumps({"kind": "train", "step": 1, "loss": 2.0, "memory": 1}) + "\nbroken\n"
    )
    (output / "recipe.yaml").write_text(f"# {HOSTILE}")
    replace_json(output / "run.json", {"status": HOSTILE, "total": 5})
    shown = board.get(f"/api/jobs/{job.id}").json()
    assert shown["name"] == HOSTILE
    assert shown["progress"] == {"step": 1, "loss": 2.0, "total": 5}
    assert board.get(f"/api/jobs/{job.id}/samples").json()["rows"][0]["text"] == HOSTILE
    assert board.get(f"/api/jobs/{job.id}/metrics").json()["broken"] == 1
    log = board.get(f"/api/jobs/{job.id}/log").json()
    assert log == {"text": HOSTILE, "next": len(HOSTILE)}
    assert board.get(f"/api/jobs/{job.id}/log", params={"after": 10}).json()["text"] == HOSTILE[10:]
    report = board.get(f"/api/jobs/{job.id}/report")
    assert "<script" not in report.text
    assert "<img" not in report.text
    assert "&lt;script&gt;" in report.text
    assert "sandbox" in report.headers["content-security-policy"]


def test_a_run_folder_that_is_deleted_while_it_is_shown(board, workspace):
    output = workspace.root / "runs/gone"
    job = ended_job(workspace, output=str(output))
    output.mkdir(parents=True)
    (output / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0, "memory": 1}) + "\n")
    cursor = board.get(f"/api/jobs/{job.id}/metrics").json()["cursor"]
    shutil.rmtree(output)
    assert board.get(f"/api/jobs/{job.id}").json()["exists"] is False
    later = board.get(f"/api/jobs/{job.id}/metrics", params={"after": cursor}).json()
    assert later == {"rows": [], "broken": 0, "cursor": "0-0", "reset": True}
    assert board.get(f"/api/jobs/{job.id}/report").status_code == 400
    assert board.post(f"/api/jobs/{job.id}/branch", json={"step": 1, "output": "runs/new"}).status_code == 400
    assert board.post(f"/api/jobs/{job.id}/remove", json={}).status_code == 200
    assert board.get(f"/api/jobs/{job.id}").status_code == 404
    assert os.listdir(workspace.jobs) == []


def test_a_root_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        workspace_at(tmp_path / "file")
    with pytest.raises(UserError, match="no such directory"):
        workspace_at(tmp_path, (tmp_path / "none",))
