"""Apertus as GGUF: the trained numbers of its activation are metadata."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from families import case
from families.cases import BY_NAME
from gguf_models import logits_of, model_of, with_tokenizer
from llama_cpp import LlamaCpp
from meshtune.errors import UserError
from meshtune.runs.export import export
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.hub import locate

EXACT, TOKENS = 3e-5, list(range(3, 20))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


def test_numbers_of_the_activation_are_metadata_and_read_from_there(tmp_path: Path):
    base, file = model_of("apertus"), tmp_path / "model.gguf"
    export(base, file, gguf="Q8_0")
    tensors = load_file(base / "model.safetensors")
    gguf = read_gguf(file)
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        expected = [float(tensors[f"model.layers.{n}.mlp.act_fn.{name}"].item()) for n in range(4)]
        assert gguf.metadata[f"xielu.{name}"] == expected
    export(file, tmp_path / "again.gguf", gguf="F32")
    assert read_gguf(tmp_path / "again.gguf").metadata["xielu.alpha_n"] == gguf.metadata["xielu.alpha_n"]
    assert len(set(gguf.metadata["xielu.alpha_p"])) == 4


@pytest.mark.slow
def test_an_activation_that_was_trained_in_full_is_merged(tmp_path: Path):
    base = model_of("apertus")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["act_fn"])
    adapted = peft.get_peft_model(model, options)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "act_fn.modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = adapted(torch.tensor([TOKENS])).logits[0].numpy()
    export(tmp_path / "adapter", tmp_path / "model.gguf", gguf="F32", base=base, merge=True)
    scale = np.abs(expected).max()
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        assert np.abs(llama.logits(TOKENS) - expected).max() < EXACT * scale
    assert np.abs(logits_of(locate(tmp_path / "model.gguf"), TOKENS) - expected).max() < EXACT * scale


def test_another_activation_is_refused(tmp_path: Path):
    directory = with_tokenizer(case.directory(BY_NAME["apertus"].changed(hidden_act="relu2")), 97)
    with pytest.raises(UserError, match="an activation 'relu2'"):
        export(directory, tmp_path / "x.gguf", gguf="F16")


def test_a_list_of_another_length_is_named(tmp_path: Path):
    file = tmp_path / "model.gguf"
    export(model_of("apertus"), file, gguf="F16")
    content = file.read_bytes()
    key = b"xielu.eps"
    for broken, message in (
        (content.replace(key, b"xielu.epz"), "xielu.eps lists a number in float32 .* it is not there"),
        # The type of the list's values, float32, becomes int32.
        (
            content.replace(key + struct.pack("<II", 9, 6), key + struct.pack("<II", 9, 5)),
            "xielu.eps lists a number in float32 .* it is 4 values",
        ),
    ):
        assert broken != content
        other = tmp_path / "broken.gguf"
        other.write_bytes(broken)
        with pytest.raises(UserError, match=message):
            locate(other)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
