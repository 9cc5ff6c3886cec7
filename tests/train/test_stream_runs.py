"""Runs on streams: what a stopped and resumed one has learned, and the references that it cannot have."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.data.stream import Stream
from meshtune.errors import UserError
from meshtune.train.run import train

STEPS = 10


class Stopped(Exception):
    """Raised in place of whatever ends a process in the middle of a run."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("meshtune.data.stream.LANE_SAMPLES", 10)
        yield


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """40 questions with answers, and the same as pairs."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    texts = [" ".join(rng.choice(["Tom", "Lily", "a tree", "was happy"]) for _ in range(2 + n % 9)) for n in range(40)]
    sft = [{"instruction": f"Tell of {text}", "output": f"Once {text}."} for text in texts]
    dpo = [{"prompt": f"Tell of {text}", "chosen": f"Once {text}.", "rejected": text} for text in texts]
    for name, records in (("sft", sft), ("dpo", dpo)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def run(stage, model, chats, output, *overrides):
    fields = {
        "model": {"path": str(model), "chat_template": "plain"},
        "stage": stage,
        "data": {"train": str(chats / f"{stage}.jsonl"), "max_length": 64, "streaming": True},
        "output": str(output),
        "train": {"steps": STEPS, "batch_size": 4},
        "checkpoint": {"every": 5},
        "optimizer": {"learning_rate": 0.01},
    }
    console = Console(file=io.StringIO(), width=200)
    return train(load_recipe(fields, overrides), console=console)


def rows(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_streamed_run_that_was_stopped_has_learned_the_same(stories260k, chats, tmp_path, monkeypatch):
    run("sft", stories260k, chats, tmp_path / "whole")
    iterate = Stream.iterate

    def until_update_7(self, start=0, stop=None, **options):
        for number, batch in enumerate(iterate(self, start, stop, **options), start=start):
            if number == 7:
                raise Stopped
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "iterate", until_update_7)
        with pytest.raises(Stopped):
            run("sft", stories260k, chats, tmp_path / "parts")
    run("sft", stories260k, chats, tmp_path / "parts", "resume=true")
    full, parts = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "parts"))
    assert full.keys() == parts.keys()
    assert all(np.array_equal(full[name], parts[name]) for name in full)
    losses = [
        {
            row["step"]: row["loss"]
            for row in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
            if "loss" in row
        }
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


@pytest.mark.slow
def test_a_streamed_run_compares_answers_with_its_base(stories260k, chats, tmp_path):
    run("dpo", stories260k, chats, tmp_path / "dpo", "train.steps=2")
    first = next(row["loss"] for row in rows(tmp_path / "dpo") if row.get("step") == 1)
    assert first == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "reference"), [(["method=full"], "cached"), (["stage.reference=some/model"], "some/model")]
)
def test_a_reference_computed_before_training_is_refused(overrides, reference, stories260k, chats, tmp_path):
    with pytest.raises(UserError, match=f"the reference {reference}") as caught:
        run("dpo", stories260k, chats, tmp_path / "dpo", *overrides)
    assert caught.value.where == "stage.reference"
    assert "data.streaming=false" in (caught.value.fix or "")
