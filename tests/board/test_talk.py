"""Talking: a model is a job with its own port and token, and the board passes OpenAI's API on to it."""

from __future__ import annotations

import json
import pathlib

import pytest
from boards import READABLE, TOKEN, client, request, wait

from meshtune.board import queue
from meshtune.board.routes.talk import address_of
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.quickstart import MODEL


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


def served_model(board) -> dict:
    models = board.get("/api/talk").json()["models"]
    assert [model["state"] for model in models] == ["running"], models
    return models[0]


def test_a_model_answers_through_any_board_over_its_folder(workspace):
    board = client(workspace)
    body = {"kind": "serve", "model": str(MODEL), "chat_template": "plain", "devices": {"keys": ["cpu"]}}
    job = board.post("/api/jobs", json=body).json()["id"]
    early = board.post(f"/api/talk/{job}/v1/chat/completions", json={})
    assert early.status_code == 503
    assert early.json()["error"]["code"] == "not_loaded"
    try:
        model = wait(lambda: served_model(board)["ids"], 120)[0]
        again = client(workspace, token=TOKEN)  # as after a restart, now with a token of its own
        path, headers = f"/api/talk/{job}/v1", {"authorization": f"Bearer {TOKEN}"}
        assert again.get(f"{path}/models").status_code == 401
        assert again.get(f"{path}/models", headers=headers).json()["data"][0]["id"] == model
        question = {"model": model, "messages": [{"role": "user", "content": "Once upon a time"}]}
        question |= {"temperature": 0, "max_tokens": 8}
        response = again.post(f"{path}/chat/completions", json=question, headers=headers).json()
        text = response["choices"][0]["message"]["content"]
        assert response["usage"]["completion_tokens"] == 8
        stream = again.post(f"{path}/chat/completions", json={**question, "stream": True}, headers=headers)
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        deltas = [choice["delta"].get("content", "") for event in events for choice in json.loads(event)["choices"]]
        assert "".join(deltas) == text
        unknown = again.post(f"{path}/chat/completions", json={**question, "model": "other"}, headers=headers)
        assert unknown.status_code == 404
        assert again.post(f"{path}/completions/..%2f..%2fmetrics", json={}, headers=headers).status_code == 404
        address = address_of(queue.find(workspace, job))
        assert address is not None
        shown = json.dumps(board.get(f"/api/jobs/{job}").json()) + board.get(f"/api/jobs/{job}/log").text
        assert address.token not in shown + json.dumps(served_model(board))
        assert (workspace.jobs / job / "token").stat().st_mode & 0o077 == 0
        version = queue.add(workspace, request(workspace, "version", devices={"keys": ["cpu"]}))
        assert version.state == "running"  # a model that waits for questions keeps nobody from a CPU
    finally:
        board.post(f"/api/jobs/{job}/stop", json={})
    wait(lambda: queue.find(workspace, job).state in ("finished", "stopped"))
    assert address_of(queue.find(workspace, job)) is None
    assert board.post(f"{path}/chat/completions", json=question).status_code == 503


def test_what_is_no_model_is_refused(workspace, tmp_path):
    board = client(workspace)
    (tmp_path / "secret").mkdir()
    for model in ("", "--host", "{job}/../../../../secret", "../secret", str(tmp_path / "secret"), "a b", "x/../y", 3):
        answer = board.post("/api/jobs", json={"kind": "serve", "model": model})
        assert answer.status_code == 400, model
        assert answer.json()["problems"][0]["path"] == "model"
    body = {"kind": "serve", "model": str(MODEL)}
    for extra in (
        {"quantize": "int3"},
        {"adapters": {"a=b": "x"}},
        {"adapters": {"a": "../secret"}},
        {"adapters": [1]},
    ):
        assert board.post("/api/jobs", json=body | extra).status_code == 400, extra


def test_a_log_cannot_send_questions_elsewhere(workspace):
    board = client(workspace)
    job = queue.add(workspace, queue.JobRequest("serve", "x", ("version",), str(workspace.root)))
    wait(lambda: queue.find(workspace, job.id).state == "finished")
    (job.folder / "log.txt").write_text("address  http://evil.example:80/v1\n")
    (job.folder / "token").write_text("secret")
    assert address_of(queue.find(workspace, job.id)) is None
    assert board.post(f"/api/talk/{job.id}/v1/chat/completions", json={}).status_code == 503


def test_the_catalogue_lists_what_lies_in_the_folders(workspace):
    (workspace.root / "runs/one").mkdir(parents=True)
    (workspace.root / "runs/one/run.json").write_text('{"status": "finished"}')
    (workspace.root / "exports").mkdir()
    (workspace.root / "exports/small.gguf").touch()
    (workspace.root / "loop").symlink_to(workspace.root)
    entries = client(workspace).get("/api/catalogue").json()["entries"]
    assert {"path": "runs/one", "kind": "run", "status": "finished"} in entries
    assert {(entry["path"], entry["kind"]) for entry in entries} == {
        ("runs/one", "run"),
        ("exports/small.gguf", "gguf"),
        (str(MODEL), "model"),
    }


def test_adapters_are_lines_of_name_and_path(workspace):
    board = client(workspace)
    (workspace.root / "runs/polite").mkdir(parents=True)
    body = {"kind": "serve", "model": str(MODEL)}
    answer = board.post("/api/check", json={**body, "adapters": ["polite=runs/polite"]})
    assert "--adapter polite=runs/polite" in answer.json()["command"]
    wrong = ["polite", "=runs/polite", "polite="], ["a=runs/polite", "a=runs/polite"], ["a b=runs/polite"], "a=b", [1]
    for lines in wrong:
        answer = board.post("/api/check", json={**body, "adapters": lines})
        assert answer.status_code == 400, lines
        assert answer.json()["problems"][0]["path"] == "adapters", lines
    outside = board.post("/api/check", json={**body, "adapters": ["a=../secret"]})
    assert outside.status_code == 400
