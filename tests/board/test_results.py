"""Evaluations, predictions, exports and comparisons through the API: their commands, and what they have written."""

from __future__ import annotations

import json
import pathlib

import pytest
from boards import READABLE, client, long_command, recipe, request, wait

from hub.fake_hub import TOKEN as SECRET
from hub.fake_hub import running_hub
from meshtune.board import queue
from meshtune.board.routes.compare import _without_defaults
from meshtune.board.routes.results import read_figures
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.quickstart import LESSON, MODEL


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


def run_job(board, workspace, **body) -> str:
    answer = board.post("/api/jobs", json={"devices": {"keys": ["cpu"]}, **body})
    assert answer.status_code == 201, answer.text
    job = answer.json()["id"]
    done = wait(lambda: (state := queue.find(workspace, job).state) not in ("queued", "running") and state, 180)
    assert done == "finished", (workspace.jobs / job / "log.txt").read_text()
    return job


def command(board, **body) -> str:
    answer = board.post("/api/check", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["command"]


def test_an_export_is_written_and_downloaded(workspace):
    board = client(workspace)
    job = run_job(board, workspace, kind="export", model=str(MODEL), form="gguf", type="Q8_0")
    shown = board.get(f"/api/results/{job}").json()
    assert shown["folder"] == "exports/model-q8_0"
    stage = board.get(f"/api/jobs/{job}").json()["stage"]
    assert (stage["stage"], stage["done"]) == ("writing", stage["total"])
    files = {file["path"]: file["bytes"] for file in shown["files"]}
    path = "model-q8_0.gguf"
    answer = board.get(f"/api/results/{job}/files/{path}")
    assert answer.content[:4] == b"GGUF"
    assert len(answer.content) == files[path]
    assert answer.headers["content-disposition"].startswith("attachment")
    output = workspace.root / shown["folder"]
    (output / "link").symlink_to("/etc/passwd")
    for name in (
        "../../meshtune-board/queue.lock",
        "..%2f..%2fmeshtune-board%2fqueue.lock",
        "link",
        "/etc/passwd",
        "%00",
    ):
        refused = board.get(f"/api/results/{job}/files/{name}")
        assert refused.status_code in (400, 404), name
        assert b"root:" not in refused.content
    assert "link" not in {file["path"] for file in board.get(f"/api/results/{job}").json()["files"]}


@pytest.mark.slow
def test_predictions_are_shown_as_rows(workspace):
    board = client(workspace)
    body = {"model": str(MODEL), "data": str(LESSON), "limit": 2, "max_tokens": 4}
    job = run_job(board, workspace, kind="predict", **body)
    shown = board.get(f"/api/results/{job}").json()
    assert len(shown["rows"]) == 2
    assert len(shown["rows"][0]["answers"]) == len(shown["models"]) == 1
    assert shown["models"][0]["figures"]["records"] == 2
    assert shown["report"] is False
    assert board.get(f"/api/results/{job}/report").status_code == 400


def test_two_models_stand_side_by_side_while_the_second_is_measured(tmp_path: pathlib.Path):
    rows = {"base": ["a", "b"], "tuned": ["c"]}
    for name, answers in rows.items():
        lines = [
            json.dumps({"prompt": f"{n}?", "reference": "r", "answer": answer}) for n, answer in enumerate(answers)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "predictions.jsonl").write_text("\n".join([*lines, "broken"]) + "\n")
    (tmp_path / "base" / "metrics.json").write_text('{"loss": 1.5, "chrf": NaN, "signature": "x", "whole": true}')
    tasks = {"tasks": [{"name": "arc_easy", "metrics": {"acc,none": 0.25, "acc,strict": 0.5}}]}
    (tmp_path / "base" / "tasks.json").write_text(json.dumps(tasks))
    shown = read_figures(tmp_path)
    figures = {"loss": 1.5, "arc_easy acc": 0.25, "arc_easy acc,strict": 0.5}
    assert shown["models"] == [{"name": "base", "figures": figures}, {"name": "tuned", "figures": {}}]
    assert [row["answers"] for row in shown["rows"]] == [["a", "c"], ["b", None]]
    assert read_figures(tmp_path / "none") == {"models": [], "rows": []}


def test_a_report_runs_nothing(workspace):
    board = client(workspace)
    output = workspace.root / "evaluations/x"
    fields = {"kind": "eval", "name": "x", "arguments": ("version",), "root": str(workspace.root)}
    job = queue.add(workspace, queue.JobRequest(**fields, output=str(output)))
    output.mkdir(parents=True)
    (output / "report.html").write_text("<script>alert(1)</script>")
    answer = board.get(f"/api/results/{job.id}/report")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["content-security-policy"].endswith("sandbox")


def test_commands_of_evaluations_and_exports(workspace, tmp_path):
    board = client(workspace)
    (workspace.root / "arc.jsonl").touch()
    text = command(board, kind="eval", model=str(MODEL), tasks=["arc_easy=arc.jsonl", "gsm8k"], compare="base", limit=5)
    assert "--tasks arc_easy=arc.jsonl --tasks gsm8k" in text
    assert "--compare base --limit 5" in text
    (workspace.root / "adapter").mkdir()
    (workspace.root / "adapter/adapter_config.json").touch()
    body = {"kind": "export", "form": "gguf", "type": "Q4_K_M", "merge": True}
    assert "--merge --gguf Q4_K_M" in command(board, model="adapter", **body)
    assert "--merge" not in command(board, model=str(MODEL), **body)
    assert "/own.gguf/own.gguf --merge" in command(board, model="adapter", output="own.gguf", **body)
    assert "--format bitsandbytes" in command(board, kind="export", model=str(MODEL), form="codes")
    assert command(board, kind="export", model=str(MODEL), form="merged").endswith("exports/model-merged")
    pushed = command(board, kind="push", model="adapter", repository="me/model", form="merged")
    assert pushed.endswith("me/model --merge")
    assert "--public" not in pushed
    (tmp_path / "secret").mkdir()
    wrong = [
        ("tasks", {"kind": "eval", "tasks": ["arc_easy=../secret"]}),
        ("tasks", {"kind": "eval", "tasks": ["--output=/etc"]}),
        ("tasks", {"kind": "eval", "tasks": "mmlu"}),
        ("limit", {"kind": "eval", "limit": 0}),
        ("compare", {"kind": "eval", "compare": "../secret"}),
        ("data", {"kind": "predict"}),
        ("data", {"kind": "predict", "data": "../secret"}),
        ("output", {"kind": "export", "output": "../secret"}),
        ("output", {"kind": "export", "output": "meshtune-board/jobs"}),
        ("type", {"kind": "export", "form": "gguf", "type": "Q1"}),
        ("form", {"kind": "export", "form": "adapter"}),
        ("repository", {"kind": "push", "repository": "--public"}),
        ("token", {"kind": "push", "repository": "a/b", "token": "two words"}),
        ("devices.processes", {"kind": "export", "devices": {"processes": 2}}),
        ("slurm", {"kind": "eval", "slurm": {"nodes": 1}}),
    ]
    for path, body in wrong:
        answer = board.post("/api/check", json={"model": str(MODEL), **body})
        assert answer.status_code == 400, body
        assert answer.json()["problems"][0]["path"] == path, body


def test_sources_are_compared_by_what_is_not_a_default():
    source = {"path": "chats.jsonl", "name": None, "split": "train", "format": "auto", "weight": None}
    assert _without_defaults("data.train", [source, source | {"weight": 2.0}]) == [
        "chats.jsonl",
        {"path": "chats.jsonl", "weight": 2.0},
    ]
    assert _without_defaults("data.validation", 0.05) == 0.05
    assert _without_defaults("data.train", [{"unknown": 1}]) == [{"unknown": 1}]


def test_runs_are_compared_by_the_keys_in_which_they_differ(workspace):
    board = client(workspace)
    jobs = []
    for name, rank, loss in (("one", 4, 2.0), ("two", 8, 1.5)):
        output = workspace.root / "runs" / name
        fields = {"kind": "train", "name": name, "arguments": ("version",), "root": str(workspace.root)}
        text = recipe(f"runs/{name}").replace("rank: 4", f"rank: {rank}")
        jobs.append(queue.add(workspace, queue.JobRequest(**fields, output=str(output)), text).id)
        output.mkdir(parents=True)
        rows = [{"kind": "eval", "step": step, "loss": loss + 1 / (step + 1), "memory": 1} for step in (0, 9)]
        (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = board.get("/api/compare", params={"job": jobs}).json()
    assert shown["keys"] == [{"key": "method.rank", "values": [4, 8]}]
    assert [run["figures"]["first_validation"] for run in shown["runs"]] == [3.0, 2.5]
    assert [run["figures"]["validation"] for run in shown["runs"]] == [2.1, 1.6]
    assert board.get("/api/compare").status_code == 400
    assert board.get("/api/compare", params={"job": "00009-none"}).status_code == 404


def test_a_token_reaches_its_push_alone_and_no_file(workspace, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(workspace.root / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    board = client(workspace)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        busy = queue.add(workspace, request(workspace, *long_command(workspace), devices={"keys": ["cpu"]})).id
        body = {"kind": "push", "model": str(MODEL), "repository": "ann/model", "devices": {"keys": ["cpu"]}}
        refused = board.post("/api/check", json={**body, "token": f"{SECRET} {SECRET}"})
        assert refused.status_code == 400
        answer = board.post("/api/jobs", json={**body, "token": SECRET})  # starts beside it
        job = answer.json()["id"]
        done = wait(lambda: (state := queue.find(workspace, job).state) not in ("queued", "running") and state, 120)
        log = (workspace.jobs / job / "log.txt").read_text()
        assert done == "finished", log
        assert "model.safetensors" in hub.repositories["ann/model"].files
        again = board.post("/api/jobs", json={**body, "repository": "ann/other"}).json()["id"]  # without a token
        assert board.post(f"/api/jobs/{busy}/stop", json={"now": True}).status_code == 200
        wait(lambda: queue.find(workspace, again).state == "failed", 120)
        assert "there is no token" in (workspace.jobs / again / "log.txt").read_text()
        shown = board.get(f"/api/jobs/{job}").json()
    assert shown["stage"]["result"] == f"{hub.url}/ann/model"
    assert SECRET not in refused.text + answer.text + json.dumps(shown) + board.get("/api/jobs").text
    for path in workspace.root.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


RECIPE_OF_DATA = """
teacher: {teacher}
documents: docs
kinds: [qa]
output: made/first
"""


def test_the_command_that_makes_data(workspace, tmp_path):
    board = client(workspace)
    (workspace.root / "docs").mkdir()
    (tmp_path / "secret").mkdir()
    text = RECIPE_OF_DATA.format(teacher=MODEL)
    assert "data generate" in command(board, kind="data", recipe=text)
    assert command(board, kind="data", recipe=text, resume=True).endswith("recipe.yaml --resume")
    wrong = [
        ("recipe", ""),
        ("documents", text.replace("docs", "../secret")),
        ("documents", text.replace("docs", "/etc")),
        ("output", text.replace("made/first", "../secret")),
        ("kinds", text.replace("qa", "../secret/mine.yaml")),
        ("teacher.path", RECIPE_OF_DATA.format(teacher="{path: 'http://127.0.0.1:1/v1', key: HOME}")),
        ("teacher.path", RECIPE_OF_DATA.format(teacher=tmp_path / "secret")),
        ("budget.tokens", f"{text}budget: {{tokens: 0}}"),
    ]
    for path, content in wrong:
        answer = board.post("/api/check", json={"kind": "data", "recipe": content})
        assert answer.status_code == 400, content
        assert answer.json()["problems"][0]["path"] == path, content
