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
from meshtune.train.report.events import RolledOut
from meshtune.train.report.metrics_log import MetricsLog
from meshtune.train.report.page import report_html

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


ONLINE = """
stage: grpo
rollout: {prompts: 1, samples: 2, max_tokens: 8}
rewards: [REWARD]
"""


@pytest.mark.parametrize("reward", ["reward.py:score", "os:system", "{kind: code}"])
def test_code_of_a_recipe_runs_only_on_a_board_with_leave_to(tmp_path, reward):
    root = tmp_path / "root"
    root.mkdir()
    (root / "reward.py").write_text("def score(completions, **kwargs): return [0.0] * len(completions)\n")
    body = {"kind": "train", "recipe": recipe(extra=ONLINE.replace("REWARD", reward))}
    answer = client(workspace_at(root, READABLE)).post("/api/check", json=body)
    assert "with the rights of the board, which was started without leave to" in problems(answer)["rewards.0"]
    assert "meshtune board --run-code" in answer.json()["problems"][0]["fix"]
    workspace = workspace_at(root, READABLE, runs_code=True)
    assert client(workspace).post("/api/check", json=body).status_code == 200
    assert queue.add(workspace, request(workspace, "version")).request.runs_code


def test_rewards_have_files_of_the_workspace_only(tmp_path):
    board = client(workspace_at(tmp_path / "root", READABLE, runs_code=True))
    outside = tmp_path / "other.py"
    outside.write_text("def score(completions): return [0.0] * len(completions)\n")
    for reward, key in (
        (f"{outside}:score", "function"),
        ("{model: ../run}", "model"),
        ("{json_schema: /a}", "json_schema"),
    ):
        body = {"kind": "train", "recipe": recipe(extra=ONLINE.replace("REWARD", reward))}
        assert list(problems(board.post("/api/check", json=body))) == [f"rewards.0.{key}"]


def test_a_run_shows_its_newest_completions_in_page_and_report(board, workspace):
    output = workspace.root / "runs/online"
    output.mkdir(parents=True)
    job = ended_job(workspace, output=str(output))
    rollout = [
        {"rollout": step, "step": step, "group": 0, "prompt": [{"role": "user", "content": HOSTILE}], "origin": "d",
         "completion": f"{step}: {text}", "rewards": {"right": value, "form": None}, "advantage": value, "tokens": 3,
         "reason": "stop"}
        for step, text, value in ((1, "old", 0.5), (2, "worse", -1.0), (2, "better", 1.0))
    ]  # fmt: skip
    events = [RolledOut(row["step"], [row]) for row in rollout]
    log = MetricsLog(output)
    for event in events:
        log.receive(event)
    log.close()
    answer = board.get(f"/api/jobs/{job.id}/rollouts").json()
    assert [row["completion"] for row in answer["rows"]] == ["2: better", "2: worse"]
    assert answer["rows"][0]["prompt"] == HOSTILE
    report = report_html(output)
    assert report.index("2: better") < report.index("2: worse")
    assert "1: old" not in report
    assert "<script>" not in report
