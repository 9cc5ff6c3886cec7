"""Requests and files of strangers, over every route of the board: nothing outside the root is reached, and nothing that
a request holds is answered with a failure of the server."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from typing import Any

import pytest
from boards import ADDRESS, READABLE, client, recipe, request
from starlette.routing import Mount, Route

from meshtune.board import queue
from meshtune.board.job import EXIT, PROCESS, Job
from meshtune.board.routes import all_routes
from meshtune.board.state import BoardState, Planner
from meshtune.board.workspace import Workspace, check_job, checked_recipe, workspace_at
from meshtune.config.data_recipe import template_text
from meshtune.config.fields import json_schema
from meshtune.errors import UserError
from meshtune.quickstart import DIRECTORY
from meshtune.serve.guard import Gate

MODEL, LESSON = str(DIRECTORY / "model"), str(DIRECTORY / "lesson.jsonl")
# Keys of a recipe that hold text: those of paths, and the others, which are never opened.
PATHS = (
    *("model.path", "model.tokenizer", "model.chat_template", "model.adapter", "model.merge_adapters[]"),
    *("data.train[].path", "data.validation[].path", "data.registry", "output", "stage.reference", "evaluate.tasks.*"),
    *("teacher.path", "vision.media_dir"),
)
OTHER_TEXTS = (
    *("checkpoint.every", "checkpoint.mtbf", "mesh.dcn"),
    *("checkpoint.copy_to", "data.prepared"),  # addresses, tried below
    *("model.revision", "model.new_tokens[]", "model.new_special_tokens[]", "data.system", "method.targets"),
    *("method.targets[]", "method.train_modules[]", "method.modules[]", "optimizer.no_decay[]", "evaluate.metrics[]"),
    *(
        "hub.repository",
        "hub.base_model",
        "sample.prompts[]",
        "sample.prompts[][].*",
        "log.project",
        "teacher.revision",
        "teacher.model",
    ),
    # Those of rewards that are paths are tried in test_app, environments below.
    *(f"rewards[].{key}" for key in ("column", "function", "group", "json_schema", "model", "name", "pattern", "url")),
    *("rollout.environment", "rollout.environment.*"),
    *(
        f"data.{split}[].{key}"
        for split in ("train", "validation")
        for key in ("name", "subset", "split", "revision", "columns.*", "tags.*")
    ),
)


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    workspace = workspace_at(tmp_path / "root", READABLE)
    outside = tmp_path / "outside"
    shutil.copytree(MODEL, outside / "model")
    (outside / "file").write_text('{"text": "a secret"}\n')
    (outside / "run.json").write_text("{}")
    (workspace.root / "link").symlink_to(outside)
    (workspace.root / "file-link").symlink_to(outside / "file")
    (workspace.root / "inside").mkdir()
    return workspace


@pytest.fixture
def planner_requests(monkeypatch) -> list[dict[str, Any]]:
    """Records requests to the planning process, which answers nothing."""
    requests: list[dict[str, Any]] = []

    async def ask(_: Planner, fields: dict[str, Any], page: str) -> dict[str, Any]:
        requests.append(json.loads(json.dumps(fields, allow_nan=False)))
        return {}

    monkeypatch.setattr(Planner, "ask", ask)
    return requests


@pytest.fixture
def job(workspace: Workspace) -> Job:
    """A run that has ended, of a recipe that can be branched from and resumed."""
    fields = request(workspace, "train", "{job}/recipe.yaml", output=str(workspace.root / "runs/first"))
    folder = queue._write(workspace, [], fields, recipe())
    (folder / EXIT).write_text('{"code": 1}')
    return queue.find(workspace, folder.name)


def escapes(workspace: Workspace) -> list[str]:
    outside = workspace.root.parent / "outside"
    return [
        *(f"{outside}/model", f" {outside}/model", f"{outside}/model ", f"\t{outside}/file", f"\u00a0{outside}/model"),
        *("../outside/model", "later/../../outside/file", "inside/../../outside/file", "..", "inside/..", "./.."),
        *("link", "link/model", "link/file", "file-link", "inside/../link/file", f"/{outside}/file"),
        *(f"/proc/self/root{outside}/file", "/proc/self/cwd/../outside", "~", "~root/x", "~/x"),
        *("${HOME}/x", "$HOME/x", "$(pwd)/x", f"file://{outside}/file", "http://127.0.0.1:1/x", "https://h/x.jsonl"),
        *(
            "a\0b",
            "inside/a\nb",
            "inside/a\x7f",
            "..\\..\\outside",
            "x" * 300,
            "a/" * 5000,
            "",
            " ",
            "/",
            "/etc/passwd",
        ),
    ]


def bodies(escape: str, workspace: Workspace, job: Job) -> dict[str, list[dict[str, Any]]]:
    """Requests of each route that hold `escape` where a path is expected."""
    model = {"kind": "export", "model": MODEL, "form": "gguf"}
    text = recipe().replace(str(LESSON), "ESCAPE")
    quoted = json.dumps(escape)
    foreign = f"stage: sft\nmodel_name_or_path: m\noutput_dir: o\ndataset: x\ndataset_dir: {quoted}\n"
    started = [
        {"recipe": text.replace("ESCAPE", quoted)},
        {"recipe": recipe(quoted)},
        *({"kind": kind, "model": escape} for kind in ("serve", "eval", "export")),
        {"kind": "predict", "model": escape, "data": LESSON},
        {"kind": "predict", "model": MODEL, "data": escape},
        {"kind": "push", "model": escape, "repository": "a/b"},
        {"kind": "eval", "model": MODEL, "tasks": [f"arc_easy={escape}"]},
        {"kind": "serve", "model": MODEL, "adapters": {"a": escape}},
        {"kind": "serve", "model": MODEL, "adapters": [f"a={escape}"]},
        *({"kind": "data", "recipe": text} for text in data_recipes(escape)),
        *([{"kind": "eval", "model": MODEL, key: escape} for key in ("data", "compare") if escape]),
        *([{**model, "output": escape}] if escape else []),
    ]
    return {
        "/api/check": started,
        "/api/jobs": started[:2],
        "/api/jobs/attach": [{"output": escape}],
        "/api/jobs/{job}/branch": [
            {"step": 1, "output": escape},
            {"step": 1, "output": "runs/b", "overrides": [f"data.train.0.path={quoted}"]},
        ],
        "/api/recipe/import": [{"text": foreign}] if escape.strip() else [],
        "/api/plan": [{"recipe": text.replace("ESCAPE", quoted)}],
        "/api/data/preview": [{"recipe": text.replace("ESCAPE", quoted)}],
        "/api/models/memory": [{"path": escape}],
        "/api/generate/plan": [{"recipe": text} for text in data_recipes(escape)],
    }


DATA_RECIPE = {"teacher": str(MODEL), "documents": "inside", "kinds": ["qa"], "output": "made/x"}


def data_recipes(escape: str) -> list[str]:
    """Recipes of data that hold `escape` in each place of a path."""
    source = [{"path": escape}]
    keys = {
        **{"teacher": {"path": escape}, "judge": {"path": escape}, "documents": [escape], "pictures": [escape]},
        **{"examples": source, "mix": {"data": source}, "filters": {"evaluation": source}, "tools": escape},
        **{"kinds": [{"template": escape}], "output": escape},
    }
    recipes = [{**DATA_RECIPE, key: value} for key, value in keys.items()]
    recipes.append({**DATA_RECIPE, "filters": {"grounded": {"rubric": escape}}})
    return list(map(json.dumps, recipes))


def leads_outside(workspace: Workspace, path: str) -> bool:
    """Tells whether a reader that opens this path unchanged would leave the root."""
    target = pathlib.Path(os.path.realpath(workspace.root / path.replace("\0", "")))
    return ".." in path.split("/") or not target.is_relative_to(workspace.root)


# Routes that take no path, those that take the id of a job alone, and those that take a path in their address.
NO_PATHS = {
    *("/api/session", "/sign-in", "/api/machine", "/api/compare", "/api/catalogue", "/api/talk", "/api/events"),
    *("/api/recipe", "/api/recipe/form", "/api/recipe/files", "/api/data/files", "/api/models", "/api/models/machine"),
    *("/api/generate/form", "/api/generate/files", "/api/generate/recipe", "/api/generate/jobs/{job}"),
    "/api/generate/templates",
    *(
        f"/api/jobs/{{job}}{end}"
        for end in ("", "/recipe", "/report", "/log", "/metrics", "/samples", "/rollouts", "/stop", "/remove")
    ),
    *("/api/results/{job}", "/api/results/{job}/report", "/api/talk/{job}/v1/models", "/api/talk/{job}/v1/{path:path}"),
}
IN_ADDRESS = {
    *("/api/recipe/file", "/api/data/upload", "/api/results/{job}/files/{path:path}", "/api/jobs/{job}/resume"),
    *("/api/generate/upload", "/api/generate/jobs/{job}/records"),
}


def routes_of(workspace: Workspace) -> list[Route]:
    state = BoardState(workspace, Gate(), None, "cookie")
    routes = all_routes(state)
    assert [type(route) for route in routes if not isinstance(route, Route)] == [Mount]
    return [route for route in routes if isinstance(route, Route)]


def texts_of(
    node: dict[str, Any], definitions: dict[str, Any], path: str = "", above: tuple[str, ...] = ()
) -> set[str]:
    """Keys of a recipe that take any text."""
    name = node.get("$ref", "").rpartition("/")[2]
    if name:
        return set() if name in above else texts_of(definitions[name], definitions, path, (*above, name))
    inner = [(path, child) for key in ("anyOf", "oneOf", "allOf") for child in node.get(key, [])]
    inner += [(f"{path}.{key}".strip("."), child) for key, child in node.get("properties", {}).items()]
    inner += [
        (f"{path}{end}", node[key])
        for key, end in (("items", "[]"), ("additionalProperties", ".*"))
        if isinstance(node.get(key), dict)
    ]
    texts = {path} if node.get("type") == "string" and not {"enum", "const"} & set(node) else set()
    return texts.union(*(texts_of(child, definitions, where, above) for where, child in inner))


def with_value(path: str, value: str) -> dict[str, Any]:
    content: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": [{"path": "d"}]}, "output": "runs/x"}
    if path == "stage.reference":
        return content | {"stage": {"kind": "dpo", "reference": value}}
    if path == "teacher.path":
        return content | {"stage": "distill", "teacher": {"path": value}}
    nested: Any = value
    for step in reversed(re.findall(r"[\w*]+|\[\]", path)):
        nested = [nested] if step == "[]" else {"arc_easy" if step == "*" else step: nested}
    for key, inner in nested.items():
        content[key] = {**content[key], **inner} if isinstance(content.get(key), dict) else inner
    return content


def test_every_key_of_a_recipe_that_takes_text_is_known_as_a_path_or_not():
    schema = json_schema()
    assert texts_of(schema, schema["$defs"]) == {*PATHS, *OTHER_TEXTS}


@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_a_recipe_leads_outside(workspace, path):
    checked_recipe(workspace, json.dumps(with_value(path, "inside/file")))
    for escape in escapes(workspace):
        with pytest.raises(UserError, match=r"path|outside|empty|board's own|null character|an address"):
            checked_recipe(workspace, json.dumps(with_value(path, escape)))


def test_servers_of_rewards_and_teachers_are_named_by_http_addresses_only(workspace):
    server = {"url": "http://127.0.0.1:9/score"}
    distill = with_value("teacher.path", "http://127.0.0.1:9/v1")
    distill |= {"stage": {"kind": "distill", "on_policy": 1.0}, "rollout": {"samples": 1, "max_tokens": 8}}
    grpo = with_value("rewards[].url", "") | {"stage": "grpo", "rollout": {"max_tokens": 8}, "rewards": [server]}
    for content in (distill, grpo):
        checked_recipe(workspace, json.dumps(content))
        for scheme in ("file", "ftp", "data"):
            text = json.dumps(content).replace("http:", f"{scheme}:")
            with pytest.raises(UserError, match=r"it is an address|is no address"):
                checked_recipe(workspace, text)


@pytest.mark.parametrize("key", ["checkpoint.copy_to", "data.prepared"])
def test_addresses_are_written_to_only_with_leave(tmp_path, key):
    for address in ("file:///etc/x", "s3://bucket/x"):
        text = json.dumps(with_value(key, address))
        with pytest.raises(UserError, match="without leave to") as caught:
            checked_recipe(workspace_at(tmp_path / "closed", READABLE), text)
        assert caught.value.where == key
        checked_recipe(workspace_at(tmp_path / "open", READABLE, runs_code=True), text)


def test_an_environment_runs_code_only_with_leave_and_inside(tmp_path):
    content = with_value("rollout.environment", "game.py:Game") | {"stage": "grpo"}
    content["rollout"]["max_tokens"] = 8
    text = json.dumps(content)
    with pytest.raises(UserError, match="without leave to"):
        checked_recipe(workspace_at(tmp_path / "closed", READABLE), text)
    workspace = workspace_at(tmp_path / "open", READABLE, runs_code=True)
    (workspace.root / "game.py").write_text("class Game: ...")
    checked_recipe(workspace, text)
    for escape in ("/etc/game.py", "../game.py"):
        with pytest.raises(UserError, match=r"outside|path"):
            checked_recipe(workspace, text.replace("game.py", escape))


def test_no_route_leads_outside(workspace, job, planner_requests):
    board = client(workspace)
    known = set(bodies("", workspace, job))
    assert {route.path for route in routes_of(workspace)} == known | NO_PATHS | IN_ADDRESS
    before = sorted(workspace.root.rglob("*"))
    for escape in escapes(workspace):
        for path, contents in bodies(escape, workspace, job).items():
            for body in contents:
                answer = board.post(path.replace("{job}", job.id), json=body)
                if path.endswith("/import") and not leads_outside(workspace, escape):
                    continue
                assert answer.status_code == 400, (path, body, answer.text)
                assert answer.json()["problems"][0]["message"], (path, body)
                assert "a secret" not in answer.text
        checked = board.post("/api/recipe", json={"recipe": recipe().replace(str(LESSON), json.dumps(escape))}).json()
        assert checked["problems"]
        if "\0" not in escape:
            assert board.get("/api/recipe/file", params={"name": escape}).status_code == 400
            for place in ("data", "generate"):
                upload = board.post(f"/api/{place}/upload", params={"name": escape}, content=b"x", headers=BYTES)
                assert upload.status_code == 400
    assert not planner_requests
    assert sorted(workspace.root.rglob("*")) == before
    fine = board.post("/api/check", json={"recipe": recipe()})
    assert fine.status_code == 200, fine.text
    assert board.post("/api/models/memory", json={"path": str(MODEL)}).status_code == 200
    assert planner_requests[-1]["path"] == str(MODEL)


BYTES = {"content-type": "application/octet-stream"}


def test_what_is_resolved_is_what_commands_get(workspace):
    shutil.copytree(MODEL, workspace.root / "models/small")
    (workspace.root / "alias").symlink_to(workspace.root / "models/small")
    (workspace.root / "-x").symlink_to(workspace.root / "models/small")
    body = {"kind": "serve", "model": "alias", "adapters": {"a": "./models/small"}}
    command = client(workspace).post("/api/check", json=body).json()["command"]
    assert "serve models/small" in command
    assert "a=models/small" in command
    assert workspace.source("./-x") == "models/small"
    (workspace.root / "-y").mkdir()
    assert workspace.source("./-y") == str(workspace.root / "-y")


def test_what_files_of_the_root_refer_to_stays_inside(workspace):
    """An adapter, a run, a registry and a folder of links, as they come by an upload or an archive."""
    board, outside = client(workspace), workspace.root.parent / "outside"
    adapter, run, links, registry = (workspace.root / name for name in ("adapter", "run", "links", "registry"))
    for folder in (adapter, run / "adapter", links, registry):
        folder.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(outside / "model")}))
    (run / "run.json").write_text("{}")
    (run / "recipe.yaml").write_text(f"model: {outside}/model\ndata: {{train: x}}\noutput: runs/y\n")
    (links / "records.jsonl").symlink_to(outside / "file")
    for model in ("adapter", "run"):
        for body in ({"kind": "serve", "model": model}, {"kind": "export", "model": model}):
            answer = board.post("/api/check", json=body)
            assert answer.status_code == 400
            assert "outside of" in answer.text
    (run / "recipe.yaml").write_text("model: link\ndata: {train: x}\noutput: runs/y\n")  # as an id of the hub looks
    assert "outside of" in board.post("/api/check", json={"kind": "serve", "model": "run"}).text
    (run / "recipe.yaml").write_text(f"model: {MODEL}\ndata: {{train: x}}\noutput: runs/y\n")
    (run / "base").symlink_to(outside / "model")
    assert "outside of" in board.post("/api/check", json={"kind": "serve", "model": "run"}).text
    (workspace.root / "saved/train").mkdir(parents=True)
    (workspace.root / "saved/train/data.arrow").symlink_to(outside / "file")
    assert "outside of" in board.post("/api/check", json={"recipe": recipe().replace(str(LESSON), "saved")}).text
    base = recipe().replace(f"model: {MODEL}", f"model: {{path: {MODEL}, adapter: adapter}}")
    assert "base_model_name_or_path" in board.post("/api/check", json={"recipe": base}).text
    assert "outside of" in board.post("/api/check", json={"recipe": recipe().replace(str(LESSON), "links")}).text
    named = re.sub(r"\[\{path:[^}]*\}\]", "[{name: x}]", recipe()).replace("data:\n", "data:\n  registry: registry\n")
    for entry in (
        {"file_name": str(outside / "file")},
        {"file_name": "../../outside/file"},
        {"file_name": "../link/file"},
        {"hf_hub_url": str(outside)},
        {"hf_hub_url": "later/../../outside"},
        {"hf_hub_url": "inside", "folder": "../../outside"},
        {"ms_hub_url": "../outside"},
    ):
        (registry / "dataset_info.json").write_text(json.dumps({"x": {**entry, "formatting": "alpaca"}}))
        answer = board.post("/api/check", json={"recipe": named})
        assert answer.status_code == 400, entry
        assert "data.train.0.name" in answer.text, entry
    (registry / "dataset_info.json").unlink()
    (registry / "dataset_info.json").symlink_to(outside / "file")
    assert "outside of" in board.post("/api/check", json={"recipe": named}).text


def test_paths_are_checked_again_as_a_job_starts_and_goes_on(workspace, job):
    """A path that was inside when it was checked and leads outside later."""
    (workspace.root / "data").mkdir()
    text = recipe().replace(str(LESSON), "data/later/file")
    fields = request(workspace, "train", "{job}/recipe.yaml", output=str(workspace.root / "runs/second"))
    folder = queue._write(workspace, [job], fields, text)
    waiting = queue.find(workspace, folder.name)
    check_job(workspace, waiting)
    (workspace.root / "data/later").symlink_to(workspace.root.parent / "outside")
    with pytest.raises(UserError, match="outside of"):
        check_job(workspace, waiting)
    from meshtune.board.runner import main

    assert main(folder) == 0
    assert queue.find(workspace, folder.name).exit["code"] == 2
    assert "outside of" in (folder / "log.txt").read_text()
    board = client(workspace)
    resumed = board.post(f"/api/jobs/{folder.name}/resume", json={})
    assert resumed.status_code == 400
    assert "outside of" in resumed.text
    assert (folder / PROCESS).exists()


def test_a_model_that_leads_elsewhere_since_it_was_checked_is_not_served(workspace):
    shutil.copytree(MODEL, workspace.root / "small")
    fields = request(workspace, "serve", "small", kind="serve")
    folder = queue._write(workspace, [], fields, None)
    shutil.rmtree(workspace.root / "small")
    (workspace.root / "small").symlink_to(workspace.root.parent / "outside/model")
    with pytest.raises(UserError, match="outside of"):
        check_job(workspace, queue.find(workspace, folder.name))


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


JSON = {"content-type": "application/json"}
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
