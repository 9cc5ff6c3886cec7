"""Runs on a checkpoint that is published quantised: trained over its codes, exported wide and in its format again."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import meshtune
import meshtune.quickstart
from families.case import Case, directory
from families.cases import BY_NAME
from families.published_checkpoints import block_fp8, from_block_fp8, mxfp4, rewritten
from meshtune.arrays.tree import flatten
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.export import export
from meshtune.train.run import train

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
BLOCK = (16, 16)
EVEN = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 520, "num_hidden_layers": 2}
OSS = BY_NAME["gpt_oss"].changed(**EVEN)
LLAMA = Case("llama_fp8", "llama", EVEN)
DEEPSEEK = BY_NAME["deepseek_v3"].changed(
    hidden_size=64, vocab_size=520, v_head_dim=16, moe_intermediate_size=32, intermediate_size=64
)
TOKENS = [[1, 5, 9, 22, 7, 8, 300]]


@pytest.fixture(scope="module", params=["fp8", pytest.param("mxfp4", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "mxfp4":
        rewritten(directory(OSS), folder, *mxfp4())
    else:
        rewritten(directory(LLAMA), folder, *block_fp8(BLOCK))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def recipe(model, output, *overrides):
    texts = output.parent / "texts.jsonl"
    lines = [f"Once upon a time there was number {n}, and it went to the park {n % 7} times." for n in range(40)]
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    raw = {
        "model": str(model),
        "data": {"train": [{"path": str(texts), "format": "text"}], "max_length": 64},
        "output": str(output),
        "method": {"rank": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "train": {"steps": 4, "batch_size": 2},
        "compute": {"attention": "direct"},
        "optimizer": {"learning_rate": 1e-2},
    }
    return load_recipe(raw, overrides)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    assert train(recipe(model, output)).steps == 4
    return output


def losses(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def theirs(folder):
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.slow
def test_a_run_goes_over_the_codes_and_is_that_over_the_numbers(run, model, tmp_path):
    assert losses(run)[-1] < losses(run)[0]
    loaded = meshtune.load(run)
    coded = [leaf for leaf in flatten(loaded.params).values() if isinstance(leaf, QuantisedWeight)]
    assert {leaf.format for leaf in coded} == {"mxfp4" if "mxfp4" in str(model) else "e4m3"}
    train(recipe(model, tmp_path / "wide", "quantize=none"))
    np.testing.assert_allclose(losses(tmp_path / "wide"), losses(run), rtol=1e-5)
    with pytest.raises(UserError, match="requantise"):
        train(recipe(model, tmp_path / "again", "quantize=nf4"))


def test_merged_wide_gives_transformers_the_logits_that_were_trained(run, tmp_path):
    done = export(run, tmp_path / "merged", merge=True)
    assert "codes stand for" in done.what
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    trained = meshtune.load(run).logits(TOKENS)
    np.testing.assert_allclose(theirs(tmp_path / "merged"), trained, atol=1e-4 * np.abs(trained).max())


def test_merged_in_the_format_of_the_base_keeps_what_was_not_adapted(run, model, tmp_path):
    done = export(run, tmp_path / "merged", merge=True, format="published")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "merged"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        if "self_attn" not in name:
            assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["quantization_config"] == json.loads((model / "config.json").read_text())["quantization_config"]
    trained = meshtune.load(run).logits(TOKENS)
    if "mxfp4" in str(model):  # attention is not quantised: nothing is lost
        assert "quantised again" not in done.verified
        np.testing.assert_allclose(theirs(tmp_path / "merged"), trained, atol=1e-4 * np.abs(trained).max())
        return
    assert "8 weights quantised again" in done.verified
    export(run, tmp_path / "wide", merge=True)
    wide = load_file(tmp_path / "wide/model.safetensors")
    for name in [name for name in after if "self_attn" in name and f"{name}_scale_inv" in after]:
        again, exact = from_block_fp8(after[name], after[f"{name}_scale_inv"], BLOCK), wide[name].float()
        largest = exact.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().amax((1, 3))
        spread = largest.repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert ((again - exact).abs() <= torch.maximum(exact.abs() / 16, spread / 448 / 512) * 1.001).all(), name
    ours = meshtune.load(tmp_path / "merged").logits(TOKENS)
    np.testing.assert_allclose(theirs(tmp_path / "merged"), ours, atol=1e-4 * np.abs(ours).max())


@pytest.mark.slow
def test_experts_with_adapters_are_quantised_again(tmp_path):
    model = rewritten(directory(OSS), tmp_path / "model", *mxfp4())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model)
    train(recipe(model, tmp_path / "run", "method.targets=[experts.gate_proj]", "train.steps=2"))
    done = export(tmp_path / "run", tmp_path / "merged", merge=True, format="published")
    assert "2 weights quantised again" in done.verified  # gate and up are one tensor in each of two layers
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "merged"))
    changed = {
        name for name in before if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    }
    assert changed
    assert all("gate_up_proj_" in name for name in changed)
    np.testing.assert_allclose(
        theirs(tmp_path / "merged"), meshtune.load(tmp_path / "merged").logits(TOKENS), atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_adapters_on_all_experts_go_over_their_codes_and_out_again(name, tmp_path):
    """gpt-oss' experts are fused, transposed and interleaved in one tensor of codes, those of DeepSeek V3 lie one by
    one; every matrix of every expert is adapted, and the base stays as published."""
    case, quantise = (OSS, mxfp4()) if name == "mxfp4" else (DEEPSEEK, block_fp8(BLOCK))
    model = rewritten(directory(case), tmp_path / "model", *quantise)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, model)
    targets = "method.targets=[experts]"
    train(recipe(model, tmp_path / "run", targets))
    train(recipe(model, tmp_path / "wide", targets, "quantize=none"))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    np.testing.assert_allclose(losses(tmp_path / "wide"), losses(tmp_path / "run"), rtol=1e-5)
    loaded = meshtune.load(tmp_path / "run")
    coded = [path for path, leaf in flatten(loaded.params).items() if isinstance(leaf, QuantisedWeight)]
    assert sum("/experts/" in path for path in coded) >= 3
    trained = loaded.logits(TOKENS)
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    np.testing.assert_allclose(theirs(tmp_path / "merged"), trained, atol=1e-4 * np.abs(trained).max())
