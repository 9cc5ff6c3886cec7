"""Mistakes in a recipe of data are reported at once, by the names of its keys."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from meshtune.config import data_recipe
from meshtune.config.data_recipe import load_data_recipe
from meshtune.errors import UserError

RECIPE = {"teacher": "http://host/v1", "documents": "docs", "kinds": "qa", "output": "out"}


def problem(*overrides: str, **keys: object) -> str:
    with pytest.raises(UserError) as caught:
        load_data_recipe({**RECIPE, **keys}, overrides)
    return str(caught.value)


def test_short_forms_are_written_out():
    recipe = load_data_recipe(
        {**RECIPE, "filters": {"grounded": 3, "evaluation": "e.jsonl"}, "mix": {"data": "g.jsonl"}}
    )
    assert recipe.teacher.path == "http://host/v1"
    assert recipe.documents == ["docs"]
    assert [kind.template for kind in recipe.kinds] == ["qa"]
    assert recipe.filters.grounded is not None
    assert recipe.filters.grounded.least == 3
    assert recipe.filters.evaluation[0].path == "e.jsonl"
    assert recipe.mix is not None
    assert recipe.mix.data[0].path == "g.jsonl"


def test_the_list_of_paths_has_every_key_that_is_one(tmp_path: pathlib.Path):
    """Each of them is looked for beside the recipe, but the output and what the shipped templates are called."""
    declared = set(re.findall(r"^ +(\w+): [^=]*PathText", pathlib.Path(data_recipe.__file__).read_text(), re.MULTILINE))
    assert declared == {"path", "template", "rubric", "documents", "tools", "pictures", "output"}
    names = {"teacher": "m", "judge": "j", "documents": ["d"], "pictures": ["p"], "tools": "t", "examples": "e"}
    nested = {"kinds": ["k.yaml", "qa"], "mix": {"data": "g"}, "output": "out"}
    nested |= {"filters": {"evaluation": "v", "grounded": {"rubric": "r.yaml"}}}
    for name in ("m", "j", "d", "p", "t", "e", "k.yaml", "g", "v", "r.yaml", "qa", "out"):
        (tmp_path / name).touch()
    (tmp_path / "recipe.yaml").write_text(json.dumps({**names, **nested}))
    recipe = load_data_recipe(tmp_path / "recipe.yaml")
    paths = [recipe.teacher.path, recipe.judge and recipe.judge.path, *recipe.documents, *recipe.pictures, recipe.tools]
    paths += [recipe.examples[0].path, recipe.kinds[0].template, recipe.mix and recipe.mix.data[0].path]
    paths += [recipe.filters.evaluation[0].path, recipe.filters.grounded and recipe.filters.grounded.rubric]
    assert {pathlib.Path(str(path)).parent for path in paths} == {tmp_path}
    assert (recipe.kinds[1].template, recipe.output) == ("qa", "out")


def test_overrides_change_what_the_file_says(tmp_path: pathlib.Path):
    (tmp_path / "r.yaml").write_text("teacher: http://host/v1\ndocuments: papers\nkinds: [qa]\noutput: out\n")
    (tmp_path / "papers").mkdir()
    recipe = load_data_recipe(tmp_path / "r.yaml", ["kinds.0.repeat=2", "teacher.at_once=3", "budget.tokens=1000"])
    assert recipe.kinds[0].repeat == 2
    assert recipe.teacher.at_once == 3
    assert recipe.documents == [str(tmp_path / "papers")]  # beside the recipe


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"documnets": "x"}, "did you mean 'documents'"),
        ({"teacher": {"path": "http://host/v1", "temprature": 1}}, "did you mean 'temperature'"),
        ({"filters": {"duplicats": 0.5}}, "did you mean 'duplicates'"),
        ({"budget": {"tokens": 0}}, "budget.tokens is 0: it must be a whole number above 0"),
        ({"budget": {"dollars": 0}}, "budget.dollars is 0: it must be a number above 0"),
        ({"budget": {"dollars": 1}}, "teacher.price"),
        ({"kinds": []}, "kinds"),
        ({"teacher": {"path": "model", "timeout": 3}}, "timeout is an option of a server"),
        ({"teacher": {"path": "http://host/v1", "dtype": "float32"}}, "dtype is an option of a model here"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        (
            {"teacher": "localhost:8000/v1"},
            "teacher.path: an address begins with http:// or https://: http://localhost:8000/v1",
        ),
        ({"teacher": "httpd://localhost/v1"}, "http://localhost/v1"),
        ({"teacher": "http://localhost:80a/v1"}, "teacher.path: this is no address"),
        ({"teacher": "http:///v1"}, "teacher.path: this is no address"),
        ({"judge": "http://host/v1?key=1"}, "judge.path: this is no address"),
    ],
)
def test_a_wrong_key_or_value_is_refused(keys: dict[str, object], words: str):
    assert words in problem(**keys)


def test_a_key_that_is_written_out_is_refused_and_not_repeated():
    text = problem(teacher={"path": "http://host/v1", "key": "sk-abc-123"})
    assert "no name of an environment variable" in text
    assert "sk-abc-123" not in text
    text = problem(teacher="http://me:sk-abc-123@host/v1")
    assert "put the key into an environment variable" in text
    assert "sk-abc-123" not in text


def test_all_problems_are_reported_with_their_lines(tmp_path: pathlib.Path):
    (tmp_path / "r.yaml").write_text(
        "teacher: http://host/v1\nkinds: [qa]\nseed: x\nbugdet: {tokens: 0}\noutput: out\n"
    )
    with pytest.raises(UserError, match=r"2 problems[\s\S]*line 3[\s\S]*line 4"):
        load_data_recipe(tmp_path / "r.yaml")


def test_a_recipe_of_training_is_named(tmp_path: pathlib.Path):
    (tmp_path / "r.yaml").write_text("model: m\ndata: d.jsonl\noutput: out\n")
    with pytest.raises(UserError, match=r"recipe of training[\s\S]*meshtune train"):
        load_data_recipe(tmp_path / "r.yaml")
