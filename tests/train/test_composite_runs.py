"""Runs on a vision-language model: its text model is tuned, its tower stays the same, and peft loads the adapter over
the whole. Tolerance 1e-4 on float32 logits: the libraries sum in different orders."""

from __future__ import annotations

import io
import json
import pathlib
import shutil

import numpy as np
import peft
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.numpy import load_file
from twins import forward

from families.case import torch_model
from families.cases import BY_NAME
from meshtune.config.load import load_recipe
from meshtune.generate.api import load
from meshtune.runs.export import export
from meshtune.train.result.final import Result
from meshtune.train.run import train

TOKENS = np.random.default_rng(0).integers(3, 512, (2, 12))
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


@pytest.fixture
def gemma3(stories260k: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A random composite with the tokenizer of stories260k, and a processor."""
    case = BY_NAME["gemma3_vision"].changed(vocab_size=512, hidden_size=64, intermediate_size=64, head_dim=16)
    model = tmp_path / "gemma3"
    torch_model(case).save_pretrained(model)
    for name in TOKENIZER:
        if (stories260k / name).is_file():
            shutil.copy(stories260k / name, model)
    (model / "preprocessor_config.json").write_text('{"size": 16}')
    return model


def run(source: pathlib.Path, /, **fields: object) -> tuple[Result, str]:
    """(the result of two updates, what the console said)."""
    lesson = source.parent / "lesson.jsonl"
    lesson.write_text("".join(json.dumps({"text": f"{name} had a hat."}) + "\n" for name in "abcd"))
    console = Console(file=io.StringIO(), width=200)
    recipe = {
        "model": {"path": str(source)},
        "data": {"train": str(lesson), "max_length": 32},
        "output": str(source.parent / "run"),
        "train": {"steps": 2, "batch_size": 2},
        "optimizer": {"learning_rate": 0.02, "schedule": "constant", "warmup_steps": 0},
        "mesh": {},
    }
    result = train(load_recipe(recipe | fields), console=console)
    return result, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def their_logits(directory: pathlib.Path, adapter: pathlib.Path | None = None) -> np.ndarray:
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
        adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
        assert adapted
        assert not any("vision_tower" in name for name in adapted)
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def our_logits(path: pathlib.Path) -> np.ndarray:
    model = load(str(path))
    return np.asarray(forward(model.params, model.spec, model.compute, TOKENS.astype(np.int32)))


def same_towers(first: pathlib.Path, second: pathlib.Path) -> None:
    before, after = tensors(first), tensors(second)
    assert before.keys() == after.keys()
    for name in before:
        if "language_model" not in name:
            np.testing.assert_array_equal(after[name], before[name], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, {"format": "nf4", "block_size": 64}])
def test_an_adapter_of_the_text_model_is_one_of_the_whole(gemma3: pathlib.Path, quantize: dict[str, object] | None):
    fields = {} if quantize is None else {"quantize": quantize}
    result, output = run(gemma3, method={"kind": "lora", "rank": 4}, **fields)
    assert "text model of gemma3" in output
    assert "not tuned and passed through: " in output
    into = None if quantize is None else "full"
    merged = export(gemma3.parent / "run", gemma3.parent / "merged", merge=True, into=into)
    same_towers(gemma3, merged.path)
    assert (merged.path / "preprocessor_config.json").is_file()
    theirs = their_logits(gemma3, pathlib.Path(result.path))
    np.testing.assert_allclose(their_logits(merged.path), theirs, atol=1e-4)
    assert np.abs(theirs - their_logits(gemma3)).max() > 0.01
    if quantize is None:
        np.testing.assert_allclose(our_logits(gemma3.parent / "run"), theirs, atol=1e-4)


@pytest.mark.slow
def test_full_tuning_writes_the_whole_again(gemma3: pathlib.Path):
    result, _ = run(gemma3, method={"kind": "full"})
    same_towers(gemma3, pathlib.Path(result.path))
    theirs = their_logits(pathlib.Path(result.path))
    np.testing.assert_allclose(our_logits(gemma3.parent / "run"), theirs, atol=1e-4)
    assert np.abs(theirs - their_logits(gemma3)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"method": {"kind": "llama_pro", "blocks": 2}}, {"method": {"kind": "lora"}, "tokens": ["<call>"]}]
)
def test_new_layers_and_new_tokens_leave_the_tower(gemma3: pathlib.Path, fields: dict[str, object]):
    model = {"path": str(gemma3), "new_tokens": fields.pop("tokens", [])}
    run(gemma3, model=model, **fields)
    before, start = tensors(gemma3), tensors(gemma3.parent / "run/base")
    towers = {name for name in before if "language_model" not in name}
    assert towers == {name for name in start if "language_model" not in name}
    assert all(np.array_equal(before[name], start[name]) for name in towers)
    np.testing.assert_allclose(their_logits(gemma3.parent / "run/base")[..., :512], their_logits(gemma3), atol=1e-6)
