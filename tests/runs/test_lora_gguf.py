"""Adapters as LoRA GGUF, and merged, in a real llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from families.cases import BY_NAME
from gguf_models import logits_of, model_of
from llama_cpp import LlamaCpp
from meshtune.errors import UserError
from meshtune.runs.export import export
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.hub import locate

PROMPT = [1, 403, 407, 261, 378]


def adapter_of(base: Path, folder: Path, **options: object) -> Path:
    """An adapter of peft with random factors, large enough to change the text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"} | options
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "r": 3}], ids=["lora", "rslora"])
def test_base_and_lora_gguf_give_the_text_of_the_merged_model(stories260k: Path, tmp_path: Path, options: dict):
    adapter = adapter_of(stories260k, tmp_path / "adapter", **options)
    base, lora, merged_file = (tmp_path / f"{name}.gguf" for name in ("base", "lora", "merged"))
    export(stories260k, base, gguf="F32")
    export(adapter, lora, gguf="F32", base=stories260k)
    export(adapter, merged_file, gguf="F32", base=stories260k, merge=True)
    with LlamaCpp(base) as model:
        plain = model.greedy(PROMPT, 100)
    with LlamaCpp(base, [lora]) as model:
        text, beside = model.greedy(PROMPT, 100), model.logits(PROMPT)
    with LlamaCpp(merged_file) as model:
        assert model.greedy(PROMPT, 100) == text
        merged = model.logits(PROMPT)
    assert text != plain
    # What peft computes with the adapter beside its base.
    reference = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32), str(adapter)
    )
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0].numpy()
    scale = np.abs(expected).max()
    assert np.abs(merged - expected).max() < 3e-5 * scale
    assert np.abs(beside - expected).max() < 3e-5 * scale
    assert (tmp_path / "lora.Modelfile").read_text(encoding="utf-8").splitlines()[1:3] == [
        "FROM ./base.gguf",
        "ADAPTER ./lora.gguf",
    ]


@pytest.mark.parametrize(
    ("options", "file_type", "message"),
    [
        ({}, "Q4_K_M", "add --merge"),
        ({"use_dora": True}, "F16", "'dora' cannot be said in a LoRA GGUF"),
        ({"modules_to_save": ["lm_head"]}, "F16", "trained in full"),
    ],
)
def test_what_a_lora_gguf_cannot_say_is_refused(
    stories260k: Path, tmp_path: Path, options: dict, file_type: str, message: str
):
    adapter = adapter_of(stories260k, tmp_path / "adapter", **options)
    with pytest.raises(UserError, match=message):
        export(adapter, tmp_path / "x.gguf", gguf=file_type, base=stories260k)
    assert not (tmp_path / "x.gguf").exists()


def test_dora_is_written_merged(stories260k: Path, tmp_path: Path):
    adapter = adapter_of(stories260k, tmp_path / "adapter", use_dora=True)
    export(adapter, tmp_path / "x.gguf", gguf="F32", base=stories260k, merge=True)
    reference = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32), str(adapter)
    )
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0].numpy()
    with LlamaCpp(tmp_path / "x.gguf") as model:
        assert np.abs(model.logits(PROMPT) - expected).max() < 3e-5 * np.abs(expected).max()


def test_an_adapter_is_not_a_model(stories260k: Path, tmp_path: Path):
    adapter = adapter_of(stories260k, tmp_path / "adapter")
    export(adapter, tmp_path / "lora.gguf", gguf="F16", base=stories260k)
    assert read_gguf(tmp_path / "lora.gguf").metadata["general.type"] == "adapter"
    with pytest.raises(UserError, match="is an adapter, not a model"):
        export(tmp_path / "lora.gguf", tmp_path / "y.gguf", gguf="F16")


def test_an_adapter_is_merged_into_a_base_in_gguf(stories260k: Path, tmp_path: Path):
    adapter = adapter_of(stories260k, tmp_path / "adapter")
    export(stories260k, tmp_path / "base.gguf", gguf="F32")
    for name, base in (("files", stories260k), ("gguf", tmp_path / "base.gguf")):
        export(adapter, tmp_path / f"{name}.gguf", gguf="F32", base=base, merge=True)
    ours, theirs = (read_gguf(tmp_path / f"{name}.gguf") for name in ("gguf", "files"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        content = [read.file.read_bytes()[tensor.start :][: tensor.nbytes] for read in (ours, theirs)]
        assert content[0] == content[1], name


RECURRENT = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_a", "k_proj"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_rows_in_another_order_are_adapted(name: str, tmp_path: Path):
    base = model_of(name)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=RECURRENT[name])
    file, lora, tokens = tmp_path / "base.gguf", tmp_path / "lora.gguf", list(range(3, 20))
    export(base, file, gguf="F32")
    export(adapter, lora, gguf="F32", base=base)
    reference = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        plain = reference(torch.tensor([tokens])).logits[0].numpy()
        adapted = peft.PeftModel.from_pretrained(reference, str(adapter))
        expected = adapted(torch.tensor([tokens])).logits[0].numpy()
    with LlamaCpp(file, [lora]) as model:
        logits = model.logits(tokens)
    scale = np.abs(expected).max()
    assert np.abs(logits - expected).max() < 3e-5 * scale
    assert np.abs(plain - expected).max() > 1e-2 * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "qwen3_next"])
def test_adapters_of_experts_beside_the_base_are_those_merged_into_it(name: str, tmp_path: Path):
    base, options = model_of(name), dict(BY_NAME[name].peft)
    adapter = adapter_of(base, tmp_path / "adapter", **options)
    file, lora, merged_file = (tmp_path / f"{stem}.gguf" for stem in ("base", "lora", "merged"))
    export(base, file, gguf="F32")
    export(adapter, lora, gguf="F32", base=base)
    export(adapter, merged_file, gguf="F32", base=base, merge=True)
    assert any("_exps" in tensor for tensor in read_gguf(lora).tensors)
    tokens = list(range(3, 20))
    with LlamaCpp(file) as model:
        plain = model.logits(tokens)
    with LlamaCpp(file, [lora]) as model:
        beside = model.logits(tokens)
    with LlamaCpp(merged_file) as model:
        merged = model.logits(tokens)
    scale = np.abs(merged).max()
    assert np.abs(beside - merged).max() < 3e-5 * scale
    assert np.abs(plain - merged).max() > 1e-2 * scale


LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "per_layer_input_gate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules"),
    [("gemma3n", [*LAYER, "per_layer_projection", "linear_left", "linear_right"]), ("gemma4", LAYER)],
)
def test_adapters_of_layers_around_streams_and_per_layer_embeddings(name: str, modules: list[str], tmp_path: Path):
    """Applied at run time as merged into the base: the difference left is that of two roads to the same inputs of
    GELU's table."""
    base = model_of(name)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=modules)
    file, lora, merged_file = (tmp_path / f"{stem}.gguf" for stem in ("base", "lora", "merged"))
    export(base, file, gguf="F32")
    export(adapter, lora, gguf="F32", base=base)
    export(adapter, merged_file, gguf="F32", base=base, merge=True)
    tokens = list(range(3, 20))
    with LlamaCpp(file) as model:
        plain = model.logits(tokens)
    with LlamaCpp(file, [lora]) as model:
        beside = model.logits(tokens)
    with LlamaCpp(merged_file) as model:
        merged = model.logits(tokens)
    scale = np.abs(merged).max()
    assert np.abs(beside - merged).max() < 5e-3 * scale
    assert np.abs(plain - merged).max() > 0.1 * scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gemma3n", ["per_layer_model_projection"]),
        ("gemma3n", ["altup_projections.1", "altup_unembed_projections.2"]),
        ("gemma4", ["per_layer_model_projection"]),
    ],
)
def test_an_adapter_that_llama_cpp_does_not_apply_is_refused_and_merged(name: str, modules: list[str], tmp_path: Path):
    base = model_of(name)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=modules)
    with pytest.raises(UserError, match="without adapters, and would not apply that of"):
        export(adapter, tmp_path / "lora.gguf", gguf="F32", base=base)
    export(adapter, tmp_path / "merged.gguf", gguf="F32", base=base, merge=True)
    tokens = list(range(3, 20))
    # transformers limits the coefficients of Gemma 3n's prediction in training alone; nothing else differs there.
    reference = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    with torch.no_grad():
        plain = reference(torch.tensor([tokens])).logits[0].numpy()
        adapted = peft.PeftModel.from_pretrained(reference, str(adapter)).train()
        expected = adapted(torch.tensor([tokens])).logits[0].numpy()
    scale = np.abs(expected).max()
    assert np.abs(logits_of(locate(tmp_path / "merged.gguf"), tokens) - expected).max() < 1e-4 * scale
    assert np.abs(plain - expected).max() > 1e-2 * scale


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("qwen3_5", "out_proj"), ("deepseek_v2", "kv_b_proj")])
def test_an_adapter_of_columns_in_another_order_is_refused(name: str, module: str, tmp_path: Path):
    base = model_of(name)
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=[module])
    with pytest.raises(UserError, match=r"columns .* in another order, or transposed"):
        export(adapter, tmp_path / "lora.gguf", gguf="F32", base=base)
