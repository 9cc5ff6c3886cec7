"""The number of updates that `plan` counts against the number that `train` would make."""

from __future__ import annotations

import json
import pathlib

import pytest

from meshtune import quickstart
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.plan import report
from meshtune.plan.report import updates_of


def recipe_of(folder: pathlib.Path, *overrides: str) -> Recipe:
    fields = {"model": str(quickstart.MODEL), "data": {"train": str(quickstart.LESSON)}, "output": str(folder / "run")}
    return load_recipe(fields, ["data.max_length=64", "train.batch_size=4", *overrides])


@pytest.mark.parametrize("overrides", [[], ["data.packing=false"], ["train.epochs=1.5"], ["data.validation=0.2"]])
def test_updates_of_a_small_data_set_are_those_of_train(tmp_path, overrides):
    recipe = recipe_of(tmp_path, *overrides)
    train = prepare_data(recipe, load_tokenizer(quickstart.MODEL)).train
    assert updates_of(recipe).count == train.total_steps(recipe.train.epochs or 3)


def test_updates_of_a_large_data_set_are_estimated_from_a_sample(tmp_path, monkeypatch):
    """Documents of 5 to 50 words in cyclic order: the first fifth is representative up to packing."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": "word " * (5 + n % 46)}) + "\n" for n in range(2300)))
    recipe = recipe_of(tmp_path, f"data.train={file}", "stage=pt")
    exact = prepare_data(recipe, load_tokenizer(quickstart.MODEL)).train.total_steps(3)
    monkeypatch.setattr(report, "SAMPLE", 460)
    estimated = updates_of(recipe)
    # 3%: rows of the sample are packed from fewer documents, so that they are a little less full.
    assert estimated.count == pytest.approx(exact, rel=0.03)
    assert estimated.source == "3 epochs, estimated from 460 of 2,300 documents"


def test_steps_of_the_recipe_are_taken_without_reading_data(tmp_path):
    recipe = recipe_of(tmp_path, "train.steps=7", "data.train=absent.jsonl")
    assert updates_of(recipe) == report.Updates(7, "train.steps")


def test_data_that_are_not_local_are_not_read(tmp_path):
    result = updates_of(recipe_of(tmp_path, "data.train=some/hub-data"))
    assert result.count is None
    assert "some/hub-data" in result.source


def test_data_that_cannot_be_read_are_no_error_of_the_plan(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("not JSON\n")
    result = updates_of(recipe_of(tmp_path, f"data.train={file}"))
    assert result.count is None
    assert "could not be read" in result.source
