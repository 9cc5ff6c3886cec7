"""Prompts and answers of tokenised documents, and which rollouts of a distillation are the student's own."""

from __future__ import annotations

import importlib.util
import pathlib
import types

import numpy as np
import pytest

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.answered_prompts import AnsweredPrompts
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.rollout.distill import DistillSource
from meshtune.setup.stage import batch_arrays
from meshtune.weights.load import load_spec

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
RECORDS = """\
{"prompt": "Tom had a", "completion": " red hat."}
{"prompt": "One day, Lily and her mother went to the big park to play with the dog, and", "completion": " it was fun."}
{"prompt": "A cat", "completion": " sat. The end."}
"""


def recipe(folder: pathlib.Path, max_length: int = 64, on_policy: float = 0.3):
    (folder / "data.jsonl").write_text(RECORDS)
    return load_recipe(
        {
            "model": str(MODEL),
            "teacher": str(MODEL),
            "data": {"train": str(folder / "data.jsonl"), "max_length": max_length, "shuffle": False},
            "stage": {"kind": "distill", "on_policy": on_policy},
            "rollout": {"prompts": 2, "samples": 1, "max_tokens": 16},
            "output": "out",
        }
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


def test_a_prompt_and_its_answer_are_the_document(tmp_path):
    tokenizer = load_tokenizer(MODEL)
    loader = prepare_data(recipe(tmp_path), tokenizer).train
    store = loader.store
    assert isinstance(store, AnsweredPrompts)
    texts = [tokenizer.decode(store[n].ids, skip_special_tokens=True) for n in range(3)]
    assert texts[0] == "Tom had a"
    answers = [tokenizer.decode(store.answer(n)) for n in range(3)]
    assert answers[2].strip().startswith("sat. The end.")
    assert [len(store[n].ids) for n in range(3)] == store.lengths.tolist()
    assert loader.rollout(0)[1].prompt.endswith("dog, and")


def test_prompts_that_leave_no_room_are_left_out(tmp_path):
    tokenizer = load_tokenizer(MODEL)
    assert len(prepare_data(recipe(tmp_path, max_length=32), tokenizer).train.store) == 2
    with pytest.raises(UserError, match="no document has a prompt of at most 1 tokens"):
        prepare_data(recipe(tmp_path, max_length=17), tokenizer)


def test_columns_for_rewards_are_not_listed_as_unread(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "Tom had a", "answer": "hat"}\n{"prompt": 1}\n')
    (tmp_path / "reward.py").write_text("def zero(completions, **columns):\n    return [0.0 for _ in completions]\n")
    fields = {
        "model": str(MODEL),
        "data": {"train": str(tmp_path / "data.jsonl"), "max_length": 64, "on_bad": "skip"},
        "stage": "grpo",
        "rollout": {"samples": 2, "max_tokens": 8},
        "rewards": f"{tmp_path}/reward.py:zero",
        "output": "out",
    }
    report = prepare_data(load_recipe(fields), load_tokenizer(MODEL)).report
    assert (report.unread, len(report.skipped)) == ((), 1)


def test_the_share_of_own_rollouts_is_that_of_the_recipe_and_the_same_each_time(tmp_path):
    def drawn(on_policy):
        source = types.SimpleNamespace(recipe=recipe(tmp_path, on_policy=on_policy))
        return np.array([DistillSource.is_on_policy(source, number) for number in range(2000)])

    third = drawn(0.3)
    assert abs(third.mean() - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5
    assert (third == drawn(0.3)).all()
    assert drawn(1.0).all()
    assert (third <= drawn(0.6)).all(), "a larger share contains a smaller one"


def test_a_planned_batch_has_what_the_loss_reads(tmp_path):
    asked = recipe(tmp_path)
    spec, _ = load_spec(MODEL)
    planned = batch_arrays(asked, asked.method.resolved(), spec, (1, 2, 64))
    assert set(planned) == {"tokens", "targets", "positions", "segment_ids", "weights", "units", "completion"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_own_samples_take_a_student_most_of_the_way_to_a_tuned_teacher(tmp_path, stories260k):
    """On held-out records, measured by transformers and peft; 0.88 of the distance in one run with these settings."""
    file = pathlib.Path(__file__).parents[2] / "benchmarks/distill/run.py"
    spec = importlib.util.spec_from_file_location("distill_benchmark", file)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = benchmark.distil(str(stories260k), tmp_path, 1e-2)
    assert result["teacher"] < 0.3 * result["base"]
    assert result["closed"] > 0.7
