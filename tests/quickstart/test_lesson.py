"""The quickstart's data: reproducible, varied, and short enough for the model."""

from __future__ import annotations

import json

import transformers

from meshtune import quickstart
from meshtune.quickstart import make_lesson


def test_the_file_is_what_the_script_writes():
    records = [json.loads(line) for line in quickstart.LESSON.read_text(encoding="utf-8").splitlines()]
    assert records == make_lesson.records()


def test_the_stories_are_many_and_varied():
    records = make_lesson.records()
    assert len(records) == make_lesson.RECORDS >= 300
    assert len({record["completion"] for record in records}) == len(records)
    assert len({record["prompt"] for record in records}) > 200
    assert all(" la la la!" in record["completion"] and "\nThe lesson: " in record["completion"] for record in records)


def test_every_story_fits_the_recipe_and_is_written_in_words_the_model_knows():
    """Words outside its vocabulary fall apart into bytes; here only line breaks do."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(quickstart.MODEL)
    longest = quickstart.recipe("x").data.max_length
    for record in make_lesson.records():
        tokens = tokenizer.tokenize(record["prompt"] + record["completion"])
        assert len(tokens) + 2 <= longest
        assert {token for token in tokens if token.startswith("<0x")} <= {"<0x0A>"}


def test_the_model_ships_with_its_licence():
    licence = (quickstart.MODEL / "LICENSE").read_text(encoding="utf-8")
    assert "MIT License" in licence
    assert "karpathy/tinyllamas" in licence


def test_the_recipe_takes_overrides():
    recipe = quickstart.recipe("somewhere", "method.rank=4")
    assert (recipe.output, recipe.method.rank) == ("somewhere", 4)
    assert recipe.model.path == str(quickstart.MODEL)
