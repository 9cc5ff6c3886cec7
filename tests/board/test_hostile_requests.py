"""Requests and files of strangers, over every route of the board: nothing that a request holds is answered with a
failure of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from boards import ADDRESS, DATA_RECIPE, client, recipe, routes_of

from meshtune.config.data_recipe import template_text
from meshtune.quickstart import DIRECTORY

MODEL, LESSON = str(DIRECTORY / "model"), str(DIRECTORY / "lesson.jsonl")

# Values for every field of every request.
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        2**63,
        10**400,
        1e308,
        float("nan"),
        float("inf"),
        "",
        " ",
        "\u00b2",
        "\u0663",
        "\0",
        "\u202e<b>",
    ),
    *("x" * 100_000, ".".join("a" * 5000), [], {}, ["a"], {"a": 1}, [[]], [None], [{}], "a: " + "[" * 500),
    *(json.loads("[" * 400 + "]" * 400), json.loads('{"a":' * 400 + "1" + "}" * 400)),
)
RECIPES = (
    *("a: " + "[" * 5000, "seed: " + "1" * 6000, "a: !!bool x", "a: !!int x", "a: !!float x", "a: !!timestamp x"),
    *("a: !!binary x", "a: !!set {b}", "a: !!omap [b]", "seed: .nan", "seed: .inf", "seed: !!binary aGk=", "- 1"),
    *(
        '"\\ud800": 1',
        'seed: "\\ud800"',
        "? [a]\n: 1",
        "seed: 2001-01-01",
        "<<: 1",
        "a: *b",
        "a: &a [*a]",
        "\u0085",
        "\t",
    ),
    *("seed: \u00b2", "seed: \u0663", "model: [1]", "model: {path: {a: 1}}", "data: [[[[1]]]]", "data: {train: 1}"),
    *("stage: {}", "stage: [a]", "stage: {kind: [a]}", "method: 3", "mesh: {dp: 99999999999999999999}", "output: [1]"),
    *(
        "train: {steps: 1e400}",
        "sample: {prompts: [[1]]}",
        "evaluate: {tasks: [1]}",
        "quantize: {format: {}}",
        "{}: {}",
    ),
)
FULL = {"kind": "train", "recipe": recipe(), "resume": False, "overwrite": False, "devices": {}, "slurm": None}
KINDS_BODIES = (
    FULL,
    {"kind": "serve", "model": MODEL, "adapters": {}, "quantize": "", "dtype": "", "cache": "", "chat_template": ""},
    {"kind": "eval", "model": MODEL, "tasks": ["arc_easy"], "data": "none", "compare": "base", "limit": 1, "rows": 1},
    {"kind": "eval", "model": MODEL, "num_fewshot": 1, "max_tokens": 1, "overwrite": True, "output": "runs/e"},
    {"kind": "predict", "model": MODEL, "data": LESSON, "limit": 1, "max_tokens": 1, "rows": 1},
    {"kind": "export", "model": MODEL, "form": "gguf", "type": "F16", "merge": True, "output": "runs/x"},
    {"kind": "push", "model": MODEL, "repository": "a/b", "token": "x", "public": True},
    {"kind": "data", "recipe": json.dumps(DATA_RECIPE), "resume": True, "overwrite": False},
)
DEVICES = {"keys": ["cpu"], "count": 1, "processes": 1, "beside": True}
SLURM = {"nodes": 1, "gpus": 1, "time": "1:00:00"}
POSTS: dict[str, tuple[dict[str, Any], ...]] = {
    "/api/session": ({"token": "x"},),
    "/api/check": (*KINDS_BODIES, *({**FULL, "devices": {**DEVICES, key: key}} for key in DEVICES)),
    "/api/jobs": ({"kind": "nonsense", "recipe": "", "model": "", "devices": {"keys": ["none"]}},),
    "/api/jobs/attach": ({"output": "nothing"},),
    "/api/jobs/{job}/branch": (
        {"step": 1, "output": "runs/b", "overrides": ["seed=1"], "devices": {}, "slurm": False},
    ),
    "/api/jobs/{job}/stop": ({"now": False},),
    "/api/recipe": (
        {"recipe": "seed: 1", "preset": "lora", "changes": [], "name_output": True},
        {"recipe": "seed: 1", "changes": [{"path": "seed", "value": 1, "text": "1"}]},
    ),
    "/api/recipe/import": ({"text": "stage: sft\ndataset: x\n", "devices": 1, "trl": False, "trainer": "sft"},),
    "/api/plan": ({"recipe": recipe(), "target": "here", "compile": False, "count": False, "price": 1.5, "page": "p"},),
    "/api/data/preview": ({"recipe": recipe(), "page": "p"},),
    "/api/models/memory": ({"path": str(MODEL), "page": "p"},),
    "/api/generate/recipe": (
        {"recipe": json.dumps(DATA_RECIPE), "changes": [{"path": "kinds.0.options.count", "value": 1}]},
        {"recipe": "documents: docs", "changes": [], "name_output": True},
    ),
    "/api/generate/templates": ({"name": "mine", "text": template_text("qa"), "replace": True},),
    "/api/generate/plan": ({"recipe": json.dumps(DATA_RECIPE), "page": "p"},),
    "/api/talk/{job}/v1/{path:path}": ({"model": "m", "messages": []},),
}
WITHOUT_BODY = {"/api/jobs/{job}/resume", "/api/jobs/{job}/remove", "/api/data/upload", "/api/generate/upload"}


def check_answer(answer: Any, label: object, caplog: pytest.LogCaptureFixture) -> None:
    assert answer.status_code < 500 or answer.status_code in (503, 507), (label, answer.text[:500])
    if answer.status_code >= 400:
        body = answer.json()
        message = body["problems"][0]["message"] if "problems" in body else body["error"]["message"]
        assert message, label
        assert "Traceback" not in answer.text, label
    assert not caplog.records, (label, caplog.text[-2000:])


def mutations(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A body with each hostile value in each of its fields, also inside of lists and objects."""
    mutated = [{**body, key: value} for key in body for value in VALUES]
    for key, inner in body.items():
        if isinstance(inner, dict):
            mutated += [{**body, key: {**inner, name: value}} for name in (*inner, "a") for value in VALUES]
        elif isinstance(inner, list):
            mutated += [{**body, key: [value]} for value in VALUES]
            objects = [entry for entry in inner if isinstance(entry, dict)]
            mutated += [{**body, key: [{**entry, name: v}]} for entry in objects for name in entry for v in VALUES]
    return mutated


@pytest.mark.slow
def test_no_value_of_a_request_is_a_failure_of_the_server(workspace, job, planner_requests, caplog):
    board = client(workspace)
    posts = {route.path for route in routes_of(workspace) if "POST" in (route.methods or ())}
    assert posts == set(POSTS) | WITHOUT_BODY
    for path, contents in POSTS.items():
        address = path.replace("{job}", job.id).replace("{path:path}", "chat/completions")
        for body in (mutated for content in contents for mutated in mutations(content)):
            content = json.dumps(body)
            check_answer(board.post(address, content=content, headers=JSON), (path, content[:300]), caplog)


JSON, BYTES = {"content-type": "application/json"}, {"content-type": "application/octet-stream"}
# One request of each kind that once was a failure of the server.
ONCE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/api/recipe", {"recipe": "seed: 1", "changes": [{"path": "\u00b2", "value": 1}]}),
    ("/api/recipe", {"recipe": "a: 1", "changes": [{"path": ".".join("a" * 5000), "value": 1}]}),
    *(
        ("/api/recipe", {"recipe": text})
        for text in ("a: " + "[" * 5000, "seed: " + "1" * 6000, "a: !!bool x", "a: .nan")
    ),
    ("/api/recipe", {"recipe": 'seed: "\\ud800"'}),
    ("/api/plan", {"recipe": "model: x\ndata: y\noutput: z", "price": 10**400}),
    *(("/api/jobs", {"kind": kind}) for kind in (["a"], {"a": 1}, None, 1)),
    ("/api/recipe/import", {"text": "stage: sft\n", "trainer": True}),
    ("/api/jobs/attach", {"output": "a/" * 5000}),
)


def test_requests_that_once_were_failures_of_the_server(workspace, planner_requests, caplog):
    board = client(workspace)
    for path, body in ONCE:
        check_answer(board.post(path, json=body), (path, str(body)[:100]), caplog)


@pytest.mark.slow
def test_no_recipe_is_a_failure_of_the_server(workspace, planner_requests, caplog):
    board = client(workspace)
    for text in RECIPES:
        pages = ("/api/recipe", "/api/plan", "/api/data/preview", "/api/check", "/api/recipe/import")
        for path in (*pages, "/api/generate/recipe", "/api/generate/plan", "/api/generate/templates"):
            key = "text" if path.endswith(("import", "templates")) else "recipe"
            check_answer(board.post(path, json={key: text, "name": "x"}), (path, text[:100]), caplog)
        changes = [{"path": "data.train.0.path", "value": "x"}]
        check_answer(board.post("/api/recipe", json={"recipe": text, "changes": changes}), text[:100], caplog)
        changes = [{"path": "seed", "text": text}]
        check_answer(board.post("/api/recipe", json={"recipe": "seed: 1", "changes": changes}), text[:100], caplog)


def test_no_body_is_a_failure_of_the_server(workspace, job, caplog):
    board = client(workspace)
    contents = (
        *(b"", b"null", b"1", b'"x"', b"[]", b"{", b"\xff\xfe{\0", b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}", b"{} {}"),
        *(
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"kind": ' + b"1" * 5000 + b"}",
            b'{"kind": 1e999999}',
            b'{"kind": NaN}',
        ),
        *('{"kind": "é"}'.encode("utf-16"), '{"kind": "é"}'.encode("latin-1"), b'{"kind": "x", "kind": ["y"]}'),
    )
    for route in routes_of(workspace):
        if "POST" in (route.methods or ()) and route.path not in WITHOUT_BODY:
            address = route.path.replace("{job}", job.id).replace("{path:path}", "chat/completions")
            for content in contents:
                check_answer(board.post(address, content=content, headers=JSON), (route.path, content[:60]), caplog)
    for name in ("x.jsonl", "", "²", "x" * 300 + ".jsonl", ".jsonl", "a\nb.jsonl", "con.txt", "\u202ex.txt"):
        for content in (b"", b"\xff", b"a\0", b"PK\x03\x04", b"ok"):
            answer = board.post("/api/data/upload", params={"name": name}, content=content, headers=BYTES)
            check_answer(answer, (name, content), caplog)


@pytest.mark.slow
def test_no_address_is_a_failure_of_the_server(workspace, job, planner_requests, caplog):
    board = client(workspace)
    odd = (
        "",
        "0",
        "²",
        "٣",
        "%00",
        "..",
        "..%2f..",
        "x" * 5000,
        "9" * 5000,
        "-1",
        "1" * 20,
        "%ff",
        "%ed%a0%80",
        "00001-x",
    )
    for route in routes_of(workspace):
        if "GET" not in (route.methods or ()) or route.path == "/api/events":
            continue
        for value in odd:
            address = route.path.replace("{job}", job.id).replace("{path:path}", value)
            check_answer(board.get(address), address, caplog)
            check_answer(board.get(route.path.replace("{job}", value).replace("{path:path}", "x")), value, caplog)
            query = "&".join(f"{name}={value}" for name in ("job", "after", "cursor", "name", "page", "token"))
            check_answer(board.get(f"{address}?{query}", follow_redirects=False), (address, query), caplog)
    for value in odd[1:]:
        check_answer(board.get(f"/api/events?job={value}"), value, caplog)


# Contents of run.json and of a line of metrics.jsonl that no run writes.
DEEP = "[" * 5000 + "]" * 5000
FILES = (
    *("", "null", "[]", "1", '"x"', "{", DEEP, '{"a":' * 500 + "1" + "}" * 500, "\ufeff{}", "\0" * 100, "1" * 6000),
    *(
        json.dumps({key: value, "kind": "train", "step": value, "loss": value, "memory": 1})
        for key in ("status", "total", "best", "prediction", "trained_on", "smoothed_loss", "step", "result", "x")
        for value in (None, [], {}, "x", 10**400, float("nan"), [[]], {"loss": {}}, "\ud800", -1)
    ),
    *(json.dumps({"kind": kind, "step": 1, "loss": 1.0, "memory": 1}) for kind in ([], {}, 1, "eval")),
)


@pytest.mark.slow
def test_no_file_of_a_run_is_a_failure_of_the_server(workspace, job, caplog):
    board, output = client(workspace), workspace.root / "runs/first"
    app: Any = board.app
    (output / "checkpoints/x").mkdir(parents=True)
    for content in FILES:
        for name in (
            "run.json",
            "metrics.jsonl",
            "samples.jsonl",
            "totals.json",
            "tasks.json",
            "predictions.jsonl",
            "recipe.yaml",
        ):
            (output / name).write_text(content + "\n", encoding="utf-8", errors="surrogatepass")
        for path in (
            *("/api/jobs", f"/api/jobs/{job.id}", f"/api/compare?job={job.id}", f"/api/results/{job.id}"),
            *(f"/api/jobs/{job.id}/{name}" for name in ("report", "metrics", "samples", "log")),
            *("/api/catalogue", "/api/models", "/api/data/files"),
        ):
            app.state.board._read_at = float("-inf")
            check_answer(board.get(path), (path, content[:80]), caplog)


def test_pages_of_other_sites_and_names_are_refused(workspace):
    board = client(workspace)
    for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "evil.example:7860", "[::1", "²"):
        refused = board.get("/api/jobs", headers={"host": host.encode()})
        assert refused.status_code in (400, 403), host
    for origin in (
        "http://evil.example",
        "null",
        f"{ADDRESS}.evil.example",
        "http://127.0.0.1:1",
        "file://",
        "http://[",
    ):
        assert board.post("/api/jobs/attach", json={}, headers={"origin": origin}).status_code == 403, origin
