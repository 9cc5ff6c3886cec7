"""A stage's abstract batch has the arrays of a loader's batch, and its reference is the one that the method allows."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

import meshtune
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError
from meshtune.setup.stage import batch_arrays, draws, reference_of, row_length
from meshtune.weights.load import load_spec

MODEL = pathlib.Path(meshtune.__file__).parent / "quickstart/model"
FREEZE = ["method.kind=freeze", "method.last_layers=1"]
STAGES = ["pt", "sft", "dpo", "orpo", "simpo", "cpo", "kto", "rm"]
ROWS = {
    "documents": {"text": "Tom had a red hat. It was Tom's."},
    "pairs": {"prompt": "Who had a hat?", "chosen": "Tom had a red hat.", "rejected": "Nobody."},
    "labelled": {"prompt": "Who had a hat?", "completion": "Tom had a red hat.", "label": True},
}


def recipe(data: pathlib.Path | str, *overrides: str) -> Recipe:
    fields = {"model": str(MODEL), "data": {"train": str(data), "max_length": 64}, "output": "out"}
    return load_recipe(fields | {"train": {"batch_size": 4, "micro_batch": 2, "steps": 1}}, overrides)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_planned_batch_has_the_arrays_of_a_loaded_one(stage, packing, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    kind = "documents" if stage in ("pt", "sft") else "labelled" if stage == "kto" else "pairs"
    records = [ROWS[kind] | ({"label": number % 2 == 0} if kind == "labelled" else {}) for number in range(40)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = recipe(file, f"stage={stage}", f"data.packing={str(packing).lower()}")
    data = prepare_data(asked, tokenizer_of(asked.model, MODEL)[0])
    batch = data.train.batch(0).arrays
    length = batch["tokens"].shape[-1]
    assert length == row_length(asked) or not packing
    spec, _ = load_spec(MODEL)
    planned = batch_arrays(asked, asked.method.resolved(), spec, (2, 2, length))
    assert set(planned) == set(batch)
    for name, (shape, dtype) in planned.items():
        assert np.dtype(dtype) == batch[name].dtype, name
        assert len(shape) == batch[name].ndim, name
        assert shape[:2] == batch[name].shape[:2], name
        if batch[name].shape[-1] == length:
            assert shape == batch[name].shape, name


def test_adapters_are_switched_off_for_the_reference_and_other_methods_cache_it():
    for changes, expected in ((["method=lora"], "base"), (["method=full"], "cached"), (FREEZE, "cached")):
        asked = recipe("d.jsonl", "stage=dpo", *changes)
        choice = reference_of(asked, asked.method.resolved())
        assert choice is not None
        assert choice.value == expected
    assert reference_of(recipe("d.jsonl"), recipe("d.jsonl").method.resolved()) is None


def test_a_reference_that_the_run_destroys_is_refused():
    asked = recipe("d.jsonl", "stage=dpo", "method=full", "stage.reference=base")
    with pytest.raises(UserError, match="no reference") as refusal:
        reference_of(asked, asked.method.resolved())
    fixed = recipe("d.jsonl", "stage=dpo", "method=full", "stage.reference=cached")
    assert "use cached" in (refusal.value.fix or "")
    choice = reference_of(fixed, fixed.method.resolved())
    assert choice is not None
    assert choice.value == "cached"


def test_log_probabilities_cannot_be_cached_of_data_that_are_tokenised_during_training():
    asked = recipe("d.jsonl", "stage=dpo", "method=full", "data.streaming=true")
    with pytest.raises(UserError, match="computed for all data before"):
        reference_of(asked, asked.method.resolved())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], False),
        (["method.dropout=0.1"], True),
        (["stage.neftune_alpha=5"], True),
        (["method=full"], False),
    ],
)
def test_a_step_draws_random_numbers_only_for_dropout_and_noise(changes, expected):
    asked = recipe("d.jsonl", *changes)
    assert draws(asked, asked.method.resolved()) == expected
