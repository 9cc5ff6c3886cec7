"""Paths in requests and files of strangers, over every route of the board: nothing outside the root is reached."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from typing import Any

import pytest
from boards import DATA_RECIPE, READABLE, client, recipe, request, routes_of

from meshtune.board import queue
from meshtune.board.job import PROCESS, Job
from meshtune.board.workspace import Workspace, check_job, checked_recipe, workspace_at
from meshtune.config.fields import json_schema
from meshtune.errors import UserError
from meshtune.quickstart import DIRECTORY

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
