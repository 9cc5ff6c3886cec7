"""A run of PaliGemma through the command line, from records to an export that transformers answers with."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from pictures_to_see import write_records
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import command
from families.vision.cases import PALIGEMMA2
from families.vision.checkpoints import write_checkpoint

NEW = 6


@pytest.mark.slow
def test_a_whole_run_of_paligemma(tmp_path, monkeypatch):
    """Its prompts see themselves in training, prediction, evaluation and generation, with and without pictures: greedy
    answers after the export, and what `generate` and `predict` say, are those of transformers."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    model, run, export = write_checkpoint(PALIGEMMA2, tmp_path / "model"), tmp_path / "run", tmp_path / "export"
    data = write_records(tmp_path / "data", 8)
    fields = {"model": str(model), "data": {"train": str(data), "max_length": 96}, "vision": {"train": ["projector"]}}
    fields |= {"method": {"kind": "lora", "rank": 4}, "train": {"steps": 4, "batch_size": 2}, "output": str(run)}
    fields |= {"optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(fields))

    def cli(*arguments: object) -> str:
        done = command.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cli("train", tmp_path / "recipe.yaml")
    cli("export", run, "--to", export, "--merge", "--dtype", "float32")
    greedy = ["--temperature", 0, "--max-tokens", NEW, "--dtype", "float32"]
    image, question = tmp_path / "data/1.png", "what colour?"
    said = [
        cli("generate", export, "--image", image, "--prompt", question, *greedy),
        cli("generate", export, "--chat", "--prompt", "say red", *greedy),
    ]
    cli("predict", export, "--data", data, "--output", tmp_path / "predictions", "--metrics", "f1", *greedy)
    cli("eval", export, "--data", data, "--output", tmp_path / "eval", "--metrics", "f1", "--max-tokens", NEW)
    lines = (tmp_path / "predictions/predictions.jsonl").read_text().splitlines()
    predicted = [json.loads(line) for line in lines]

    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        export, dtype=torch.float32, attn_implementation="eager"
    )
    pixels = SiglipImageProcessorPil.from_pretrained(export)

    def expected(text: str, *files: object) -> str:
        prompt = f"{'<image>' * 16 * len(files)}<s>{text}\n"
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
        if files:
            images = [Image.open(file).convert("RGB") for file in files]
            inputs["pixel_values"] = torch.tensor(np.stack(pixels(images)["pixel_values"]))
        end = tokenizer.eos_token_id
        out = theirs.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=end)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    assert [text.rstrip("\n") for text in said] == [
        expected(question, image).rstrip("\n"), expected("say red").rstrip("\n")
    ]  # fmt: skip
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record, row in zip(records, predicted, strict=True):
        text = record["messages"][0]["content"].removeprefix("<image>")
        assert row["answer"] == expected(text, *[tmp_path / "data" / name for name in record["images"]])
    assert len({row["answer"] for row in predicted}) > 1
