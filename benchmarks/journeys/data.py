"""One record of JSONL to a packed batch: `journey meshtune benchmarks/journeys/data.py` counts what it enters."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile

from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer

TOKENIZER = pathlib.Path(os.environ.get("JOURNEY_TOKENIZER", "../shared/assets/tokenizers/smollm2"))

folder = pathlib.Path(tempfile.mkdtemp())
records = [
    {"messages": [{"role": "user", "content": f"{a} + {a}?"}, {"role": "assistant", "content": f"{2 * a}."}]}
    for a in range(8)
]
(folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
(folder / "recipe.yaml").write_text(f"model: x\ndata: {folder / 'data.jsonl'}\noutput: x\n")
recipe = load_recipe(folder / "recipe.yaml", [f"model.path={TOKENIZER}", "data.max_length=64", "train.batch_size=1"])
tokenizer = load_tokenizer(TOKENIZER)


def work() -> None:
    batch = prepare_data(recipe, tokenizer, cache=folder / "cache").train.batch(0)
    assert batch.arrays["tokens"].shape == (1, 1, 64), batch.arrays["tokens"].shape
