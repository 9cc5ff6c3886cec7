"""The API behind the Recipe page: edits that keep comments, presets, imports, and plans in a process of their own."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import pytest
from boards import READABLE, client, recipe

import meshtune.board
from meshtune.board.presets import NAMES, presets
from meshtune.board.recipe_text import Change, change_of, change_recipe, content_of, dump_recipe
from meshtune.board.state import Planner
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.config.load import load_recipe, silent
from meshtune.config.sections import written_out
from meshtune.costs.hardware import find_target
from meshtune.errors import UserError
from meshtune.plan.report import report_for, to_json
from meshtune.serve.guard import ApiError

EXAMPLES = sorted(pathlib.Path(__file__).parents[2].glob("examples/*.yaml"))
TEXTS = pathlib.Path(meshtune.board.__file__).parent / "page/text"


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


def edit_recipe(recipe_yaml: str, path: str, **value: object) -> str:
    return change_recipe(recipe_yaml, [change_of({"path": path, **value})])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_edit_changes_its_key_and_no_comment(path: pathlib.Path):
    text = path.read_text(encoding="utf-8")
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    after = edit_recipe(
        edit_recipe(edit_recipe(text, "seed", value=7), "optimizer.schedule", value="linear"),
        "train.batch_size",
        text="32",
    )
    assert [line.partition("#")[2] for line in after.splitlines() if "#" in line] == comments
    expected: dict[str, Any] = written_out(content_of(text))
    actual: dict[str, Any] = written_out(content_of(after))
    assert actual.pop("seed") == 7
    assert actual["optimizer"].pop("schedule") == "linear"
    assert actual["train"].pop("batch_size") == 32
    for section, key in (("optimizer", "schedule"), ("train", "batch_size")):
        expected.setdefault(section, {}).pop(key, None)
    expected.pop("seed", None)
    assert actual == expected


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_recipe_survives_being_written_anew(path: pathlib.Path):
    content = written_out(content_of(path.read_text(encoding="utf-8")))
    assert written_out(content_of(dump_recipe(content))) == content


def test_text_that_looks_like_another_value_stays_text():
    for value in ("1e5", "null", "true", "010", "a: b", "c # d", "- x", "", "日本", "line\nbreak", "12:30", "~"):
        text = change_recipe("seed: 1\n", [Change(("data", "system"), value)])
        assert content_of(text)["data"]["system"] == value


def test_unset_removes_a_key_and_an_empty_section():
    text = "model: m  # a\nquantize:\n  format: nf4\ntrain:\n  steps: 3  # b\n  batch_size: 2\n"
    assert edit_recipe(text, "quantize.format") == "model: m  # a\ntrain:\n  steps: 3  # b\n  batch_size: 2\n"
    assert edit_recipe(text, "train.steps") == "model: m  # a\nquantize:\n  format: nf4\ntrain:\n  batch_size: 2\n"


def test_a_change_that_is_none_is_refused():
    for fields in ("x", {}, {"path": ""}, {"path": 3}):
        with pytest.raises(UserError, match="path"):
            change_of(fields)


def test_every_preset_is_valid_and_named_in_every_language():
    for name, preset in presets().items():
        load_recipe({"model": "m", "data": "d", "output": "o", "train": {"steps": 3}, **preset}, notify=silent)
        for path in TEXTS.glob("*.json"):
            assert name in json.loads(path.read_text(encoding="utf-8"))["recipe"]["preset"], (path.name, name)


def test_the_form_has_the_schema_that_the_command_prints(workspace):
    form = client(workspace).get("/api/recipe/form").json()
    assert "learning_rate" in form["schema"]["$defs"]["OptimizerOptions"]["properties"]
    assert list(form["presets"]) == list(NAMES)
    assert form["devices"]["H100"] > 70 * 2**30


def test_problems_come_with_the_path_of_their_field(workspace):
    board = client(workspace)
    answer = board.post("/api/recipe", json={"recipe": recipe(), "changes": [{"path": "train.steps", "text": "many"}]})
    assert answer.json()["values"]["train"]["steps"] == "many"
    assert [problem["path"] for problem in answer.json()["problems"]] == ["train.steps"]
    answer = board.post("/api/recipe", json={"recipe": "a: [", "changes": []}).json()
    assert answer["values"] is None
    assert "not YAML" in answer["problems"][0]["message"]
    assert "defaults" not in answer
    defaults = board.post("/api/recipe", json={"recipe": "method: {kind: full}\n"}).json()["defaults"]
    assert defaults == {"optimizer.learning_rate": "2e-05", "train.epochs": "3"}
    foreign = board.post("/api/recipe", json={"recipe": "base_model: x\nadapter: lora\ndatasets: []\n"}).json()
    assert foreign["foreign"] == "axolotl"


def test_a_preset_keeps_model_data_and_output(workspace):
    answer = client(workspace).post("/api/recipe", json={"recipe": recipe(), "preset": "dpo"}).json()
    before = written_out(content_of(recipe()))
    assert answer["values"]["stage"] == {"kind": "dpo", "beta": 0.1}
    assert {key: answer["values"][key] for key in ("model", "data", "output")} == {
        key: before[key] for key in ("model", "data", "output")
    }
    assert client(workspace).post("/api/recipe", json={"preset": "other"}).json()["problems"][0]["path"] == "preset"


def test_a_recipe_of_another_tool_is_translated_or_refused_key_by_key(workspace):
    board = client(workspace)
    text = "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
    text += "dataset: identity\noutput_dir: runs/x\n"
    answer = board.post("/api/recipe/import", json={"text": text + "template: default\n"}).json()
    content = content_of(answer["recipe"])
    assert not answer["refused"]
    assert content["output"] == "runs/x"
    template = workspace.root / content["model"]["chat_template"]
    assert template.is_relative_to(workspace.uploads)
    assert template.is_file()
    answer = board.post(
        "/api/recipe/import", json={"text": text + "quantization_method: hqq\nquantization_bit: 4\n"}
    ).json()
    assert answer["refused"]
    assert answer["recipe"] is None


def test_a_plan_is_that_of_the_command(workspace):
    with client(workspace) as board:
        body = {"recipe": recipe(), "target": "1xH100", "price": 2, "page": "one"}
        answer = board.post("/api/plan", json=body).json()
        expected = to_json(report_for(load_recipe(content_of(recipe()), notify=silent), find_target("1xH100"), price=2))
        assert {key: answer["plan"][key] for key in ("fits", "device_bytes", "breakdown", "cost")} == {
            key: expected[key] for key in ("fits", "device_bytes", "breakdown", "cost")
        }
        names = {choice["name"]: choice for choice in answer["choices"]}
        assert names["compute.precision"]["value"] == "mixed"
        assert names["optimizer.learning_rate"]["value"] == "0.0002"
        refused = board.post("/api/plan", json={"recipe": recipe(), "target": "9xNOTHING"})
        assert refused.status_code == 400
        assert "NOTHING" in refused.json()["problems"][0]["message"]
        outside = recipe().replace("model: ", "model: /etc/x # ")
        assert board.post("/api/plan", json={"recipe": outside}).status_code == 400


def test_a_newer_plan_ends_the_process_of_the_older(workspace):
    async def scenario() -> None:
        planner = Planner(workspace)
        first = asyncio.ensure_future(planner.ask({"work": "plan", "recipe": recipe(), "target": "here"}, "page"))
        await asyncio.sleep(0.5)
        second = planner.ask({"work": "plan", "recipe": recipe(), "target": "1xH100"}, "page")
        answer = await second
        assert answer["plan"]["target"] == "1xH100"
        with pytest.raises(ApiError, match="newer request"):
            await first
        await planner.close()

    asyncio.run(scenario())


def test_an_output_is_named_that_no_run_has(workspace: Workspace):
    board = client(workspace)

    def name_output(recipe: str, path: str = "hub/Small Model", key: str = "model.path") -> str:
        body = {"recipe": recipe, "changes": [{"path": key, "value": path}], "name_output": True}
        answer = board.post("/api/recipe", json=body).json()
        return content_of(answer["recipe"])["output"]

    assert name_output("") == "runs/Small-Model-1"
    assert name_output("", "models/small.Q8_0.gguf") == "runs/small.Q8_0-1"
    assert name_output("", "runs/chats", "model.adapter") == "runs/chats-1"
    assert name_output("output: own/place\n") == "own/place"
    (workspace.root / "runs/Small-Model-1").mkdir(parents=True)
    assert name_output("") == "runs/Small-Model-2"
