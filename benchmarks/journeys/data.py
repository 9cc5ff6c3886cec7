"""One record of JSONL to a packed batch: chat template, loss mask, tokens, store, rows. See README.md."""

from __future__ import annotations

import json
import pathlib
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer

RECORD = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2."}]}

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "data.jsonl").write_text(json.dumps(RECORD) + "\n")
(folder / "recipe.yaml").write_text("{model: model, data: data.jsonl, output: run}")
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
bytes_alone = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(alphabet)}, []))
bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
bytes_alone.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
PreTrainedTokenizerFast(tokenizer_object=bytes_alone, **special).save_pretrained(folder / "model")
overrides = {"model.path": folder / "model", "data.train": folder / "data.jsonl", "data.max_length": 256}
recipe = load_recipe(folder / "recipe.yaml", [f"{key}={value}" for key, value in overrides.items()])
tokenizer = load_tokenizer(folder / "model", "chatml")


def work() -> None:
    """Prepares the record in this process, without a cache of earlier runs, and takes the first batch."""
    batch = prepare_data(recipe, tokenizer, cache=folder / "cache").train.batch(0)
    assert batch.arrays["weights"].sum() == len("2.") + 1
