"""A stream trains every stage as the same records in memory do, where both have them in one order."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from meshtune.config.load import load_recipe
from meshtune.data.tokenizer import load_tokenizer
from meshtune.train.run import train

STEPS, ROWS, RECORDS, LENGTH = 6, 4, 40, 48
VOCABULARY = ["Tom", "Lily", "a tree", "was happy", "the park", "a big dog"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


def records(stage: str, model) -> list[dict]:
    rng = random.Random(0)
    texts = [" ".join(rng.choice(VOCABULARY) for _ in range(2 + n % 7)) for n in range(RECORDS)]
    if stage == "pt":
        return [{"text": text} for text in row_long_texts(model)]
    if stage == "sft":
        return [{"instruction": f"Tell of {text}", "output": f"Once {text}."} for text in texts]
    if stage == "kto":
        return [
            {"prompt": f"Tell of {text}", "completion": f"Once {text}.", "label": n % 3 != 0}
            for n, text in enumerate(texts)
        ]
    return [{"prompt": f"Tell of {text}", "chosen": f"Once {text}.", "rejected": text} for text in texts]


def row_long_texts(model) -> list[str]:
    """Texts that fill a row exactly, so that a stream of plain text divides none of them."""
    tokenizer, rng = load_tokenizer(model), random.Random(0)

    def count(text: str) -> int:
        ids = tokenizer(text)["input_ids"]
        return len(ids) + (ids[-1] != tokenizer.eos_token_id)

    texts: list[str] = []
    while len(texts) < RECORDS:
        text = ""
        while count(text) < LENGTH + 1:
            text = f"{text} {rng.choice(VOCABULARY)}".strip()
        if count(text) == LENGTH + 1:
            texts.append(text)
    return texts


def run(stage, model, file, output, *, streaming: bool):
    fields = {
        "model": {"path": str(model), "chat_template": "plain"},
        "stage": stage,
        "data": {
            "train": str(file),
            "validation": None if stage == "pt" else 8,  # records that the seed draws, held out of either
            # A row of a stream of text has so many positions; a document in memory has so many tokens.
            "max_length": LENGTH + (stage == "pt" and not streaming),
            "streaming": streaming,
            "shuffle": False,
            "packing": stage == "pt",
        },
        "output": str(output),
        "train": {"steps": STEPS, "batch_size": ROWS},
        "eval": {} if stage == "pt" else {"every": 3},
        "optimizer": {"learning_rate": 0.01},
        "seed": 5,
    }
    train(load_recipe(fields), console=Console(file=io.StringIO(), width=200))


def losses(output) -> dict[str, list[float]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kinds = {kind: [row["loss"] for row in rows if row["kind"] == kind and "loss" in row] for kind in ("train", "eval")}
    assert len(kinds["train"]) == STEPS
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo", "rm", "kto", "pt"])
def test_a_stream_trains_as_the_same_records_in_memory(stage, stories260k, tmp_path):
    """Rows of a stream are padded to max_length and those in memory to the longest, which changes the order of sums
    alone: float32 to 1e-5."""
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, records(stage, stories260k))))
    for name, streaming in (("stream", True), ("memory", False)):
        run(stage, stories260k, file, tmp_path / name, streaming=streaming)
    stream, memory = losses(tmp_path / "stream"), losses(tmp_path / "memory")
    assert bool(memory["eval"]) == (stage != "pt")
    for kind, expected in memory.items():
        np.testing.assert_allclose(stream[kind], expected, rtol=1e-5, atol=1e-6, err_msg=kind)
    assert max(memory["train"]) - min(memory["train"]) > 1e-3, "losses that are all alike would hide another order"
    learned, reference = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("stream", "memory")
    )
    assert learned.keys() == reference.keys()
    for name, value in reference.items():
        assert np.linalg.norm(learned[name] - value) < 1e-3 * np.linalg.norm(value), name
