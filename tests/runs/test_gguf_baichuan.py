"""Baichuan as GGUF: llama.cpp chooses its positions by the number of layers, and has no normalised head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file

import baichuan_files
from baichuan_in_torch import SEVEN, THIRTEEN
from gguf_models import logits_of, with_tokenizer
from llama_cpp import LlamaCpp
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.runs.export import export
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.gguf.tensors_in import small_tensor
from meshtune.weights.hub import locate

EXACT = 1e-4  # of float32 sums in 32 and 40 layers
DEEP_7B, DEEP_13B = SEVEN | {"num_hidden_layers": 32}, THIRTEEN | {"num_hidden_layers": 40}
FIRST = DEEP_7B | {"vocab_size": 64000, "architectures": ["BaiChuanForCausalLM"]}
TOKENS = np.random.default_rng(0).integers(3, 90, 24).tolist()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [DEEP_7B, DEEP_13B, FIRST],
    ids=["7B", "13B", "first 7B, whose head is plain"],
)
def test_llama_cpp_computes_the_logits_of_the_equations(config: dict, tmp_path: Path):
    directory, model = baichuan_files.directory(tmp_path, config)
    expected = _logits(model)
    export(with_tokenizer(directory, 97), tmp_path / "model.gguf", gguf="F32")
    scale = np.abs(expected).max()
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        assert np.abs(llama.logits(TOKENS) - expected).max() < EXACT * scale
    assert np.abs(logits_of(locate(tmp_path / "model.gguf"), TOKENS) - expected).max() < EXACT * scale


def _logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS]))[0].numpy()


def test_rows_of_the_head_are_written_with_a_length_of_one(tmp_path: Path):
    directory, _ = baichuan_files.directory(tmp_path, DEEP_7B)
    export(with_tokenizer(directory, 97), tmp_path / "model.gguf", gguf="F32")
    head = load_file(directory / "model.safetensors")["lm_head.weight"]
    written = small_tensor(read_gguf(tmp_path / "model.gguf"), "output.weight")
    unit = torch.nn.functional.normalize(torch.tensor(head)).numpy()
    np.testing.assert_allclose(written, unit, atol=1e-6)
    assert np.abs(written - head).max() > 0.1


def test_another_depth_is_refused(tmp_path: Path):
    for config, reason in ((SEVEN, "rotary positions by a depth of 32"), (THIRTEEN, r"\(ALiBi\) by a depth of 40")):
        folder = tmp_path / str(config["hidden_size"])
        folder.mkdir()
        directory, _ = baichuan_files.directory(folder, config)
        with pytest.raises(UserError, match=f"{reason} layers, and it has 2"):
            export(with_tokenizer(directory, 97), folder / "x.gguf", gguf="F16")
        assert not (folder / "x.gguf").exists()


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_its_tokenizer_is_that_of_sentencepiece_in_llama_cpp_and_read_back(tmp_path: Path, dummy_prefix: bool):
    directory, _ = baichuan_files.directory(tmp_path, DEEP_7B | {"vocab_size": 640})
    original = baichuan_files.trained(directory, dummy_prefix=dummy_prefix)
    export(directory, tmp_path / "model.gguf", gguf="F16")
    rebuilt, loaded = load_tokenizer(tmp_path / "model.gguf"), load_tokenizer(directory)
    assert rebuilt.get_vocab() == loaded.get_vocab()
    assert rebuilt.chat_template == loaded.chat_template
    with LlamaCpp(tmp_path / "model.gguf") as model:
        for text in baichuan_files.TEXTS:
            ids = original.encode(text)
            assert model.tokenize(text) == ids
            assert rebuilt.encode(text) == ids
            assert rebuilt.decode(ids) == original.decode(ids)
        turns = "<reserved_106>hello<reserved_107>"  # between which sentencepiece itself adds no space
        assert model.tokenize(turns) == rebuilt.encode(turns) == loaded.encode(turns)


@pytest.mark.slow
def test_a_lora_gguf_of_the_packed_projection_gives_the_logits_of_peft(tmp_path: Path):
    directory, model = baichuan_files.directory(tmp_path, DEEP_13B)
    with_tokenizer(directory, 97)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=["W_pack", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    export(directory, tmp_path / "base.gguf", gguf="F32")
    export(tmp_path / "adapter", tmp_path / "lora.gguf", gguf="F32", base=directory)
    export(tmp_path / "adapter", tmp_path / "merged.gguf", gguf="F32", base=directory, merge=True)
    expected = _logits(adapted)
    scale = np.abs(expected).max()
    with LlamaCpp(tmp_path / "base.gguf") as llama:
        assert np.abs(llama.logits(TOKENS) - expected).max() > 1e-2 * scale
    for files in (("base.gguf", [tmp_path / "lora.gguf"]), ("merged.gguf", [])):
        with LlamaCpp(tmp_path / files[0], files[1]) as llama:
            assert np.abs(llama.logits(TOKENS) - expected).max() < EXACT * scale
