"""Runs on a quantised base: trained, resumed, evaluated, exported, merged either way, and used."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors
import torch
import transformers

import meshtune
from meshtune.arrays.tree import flatten
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.export import export
from meshtune.train.run import train
from meshtune.weights.load import load_params, load_spec
from tiny_models import save_model_for_runs, write_texts_for_runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_for_runs(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts_for_runs(tmp_path_factory.mktemp("texts") / "texts.jsonl")


def recipe(model, texts, output, *overrides):
    raw = {
        "model": str(model),
        "data": {"train": [{"path": str(texts), "format": "text"}], "validation": 6, "max_length": 64},
        "output": str(output),
        "quantize": "nf4",
        "method": {"rank": 4, "dropout": 0.1},
        "train": {"steps": 6, "batch_size": 4, "micro_batch": 2},
        "compute": {"attention": "direct"},
        "optimizer": {"learning_rate": 5e-3},
        "checkpoint": {"every": 2},
        "eval": {"every": 6},
    }
    return load_recipe(raw, overrides)


def losses(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.fixture(scope="module")
def run(model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    assert train(recipe(model, texts, output)).steps == 6
    return output


def metadata(file):
    with safetensors.safe_open(str(file), framework="np") as opened:
        return json.loads(opened.metadata()["meshtune"])


def test_a_run_learns_and_its_adapter_says_what_it_was_trained_on(run, model):
    history = losses(run)
    assert history[6] < history[1]
    record = metadata(run / "adapter/adapter_model.safetensors")["base"]
    assert record["quantize"] == {"format": "nf4", "block_size": 64, "double": True}
    assert record["hash"] == json.loads((run / "run.json").read_text())["base"]["hash"]
    (newest,) = (run / "checkpoints").glob("*6")
    names = {name for file in newest.rglob("*") for name in file.parts}
    assert not any("codes" in name or "scales" in name for name in names), "the base is in no checkpoint"


@pytest.mark.slow
def test_resumed_equals_uninterrupted(run, model, texts, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(run, output)
    for left in [*(output / "checkpoints").glob("*6"), output / "adapter"]:  # as if killed after the fourth update
        shutil.rmtree(left)
    resumed = train(recipe(model, texts, output, "resume=true"))
    assert resumed.steps == 6
    assert losses(output) == losses(run)
    ours, theirs = ((folder / "adapter/adapter_model.safetensors").read_bytes() for folder in (output, run))
    assert ours == theirs


def test_a_run_is_not_resumed_on_a_base_in_another_format(run, model, texts, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    with pytest.raises(UserError, match=r"quantize\.double: True -> False"):
        train(recipe(model, texts, tmp_path / "run", "resume=true", "quantize.double=false"))


def test_chat_and_logits_use_the_base_it_was_trained_on(run, model):
    loaded = meshtune.load(run)
    weight = loaded.params["layers"]["0.0"]["mlp"]["down"]["weight"]
    assert isinstance(weight, QuantisedWeight)
    assert weight.codes.dtype == np.uint8
    text = loaded.generate("Once upon", max_tokens=5)
    assert isinstance(text, str)
    tokens = [[1, 5, 9, 22, 7]]
    wide = meshtune.load(run, quantize="none").logits(tokens)
    spread = np.abs(loaded.logits(tokens) - wide).max() / np.abs(wide).max()
    assert spread > 1e-4  # 4 bits show


def test_merged_into_the_dequantised_base_gives_the_logits_that_were_trained(run, tmp_path):
    done = export(run, tmp_path / "merged", merge=True)
    assert "dequantised" in done.what
    tokens = [[1, 5, 9, 22, 7, 8, 300]]
    trained = meshtune.load(run).logits(tokens)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(torch.tensor(tokens)).logits
    np.testing.assert_allclose(theirs.numpy(), trained, atol=2e-5 * np.abs(trained).max())
    record = metadata(tmp_path / "merged/model.safetensors")["merged"]
    assert record["into"] == "dequantised"
    assert record["trained_on"]["format"] == "nf4"


def test_merged_into_the_full_base_equals_base_and_adapter_in_peft(run, model, tmp_path):
    import peft

    done = export(run, tmp_path / "merged", merge=True, into="full")
    assert "full-precision" in done.what
    assert "the adapter was trained on the quantised base" in done.verified
    tokens = torch.tensor([[1, 5, 9, 22, 7, 8, 300]])
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, str(run / "adapter"))(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    assert (merged - expected).abs().max() < 2e-5 * expected.abs().max()
    assert metadata(tmp_path / "merged/model.safetensors")["merged"]["into"] == "full"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_every_format_trains_and_exports(format, model, texts, tmp_path):
    result = train(recipe(model, texts, tmp_path / "run", f"quantize={format}", "train.steps=2"))
    assert result.path is not None
    assert metadata(result.path / "adapter_model.safetensors")["base"]["quantize"]["format"] == format


@pytest.mark.slow
def test_modules_can_have_formats_of_their_own(model, texts, tmp_path):
    override = "quantize.modules={mlp: int8, up_proj: none, v_proj: fp8}"
    method = ["method.targets=[q_proj, v_proj, down_proj]", "method.train_modules=[up_proj]"]
    result = train(recipe(model, texts, tmp_path / "run", override, *method, "train.steps=2"))
    assert result.path is not None
    loaded = meshtune.load(tmp_path / "run")
    weights = {path: leaf for path, leaf in flatten(loaded.params).items() if path.endswith("/weight")}
    formats = {path.split("/")[-2]: leaf.format for path, leaf in weights.items() if isinstance(leaf, QuantisedWeight)}
    assert formats == {"q": "nf4", "k": "nf4", "v": "fp8", "o": "nf4", "gate": "int8", "down": "int8"}
    spec, _ = load_spec(model)
    wide = flatten(load_params(model, spec))
    for path, leaf in weights.items():
        if isinstance(leaf, QuantisedWeight):
            alone = QuantisedWeight.quantise(wide[path], QuantizeConfig(leaf.format))
            jax.tree.map(np.testing.assert_array_equal, leaf, alone)
    tokens = [[1, 5, 9, 22, 7, 8, 300]]
    done = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert "dequantised" in done.what
    trained = loaded.logits(tokens)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(torch.tensor(tokens)).logits
    np.testing.assert_allclose(theirs.numpy(), trained, atol=2e-5 * np.abs(trained).max())


def test_layers_adapted_differently_are_restacked_with_their_codes(run, model):
    from meshtune.adapters.method import restack
    from model_specs import split_stacks

    spec, _ = load_spec(model)
    config = QuantizeConfig("nf4", 32)
    split_spec = split_stacks(spec, 1)
    moved = flatten(restack(load_params(model, spec, quantize=config), spec, split_spec))
    straight = flatten(load_params(model, split_spec, quantize=config))
    assert moved.keys() == straight.keys()
    for path, leaf in moved.items():
        for ours, theirs in zip(jax.tree.leaves(leaf), jax.tree.leaves(straight[path]), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("overrides", "message", "fix"),
    [
        (["method=full"], "method full", "method: lora"),
        (["method={kind: freeze, last_layers: 1}"], "method freeze", "method: lora"),
        (["quantize=nf5"], "nf5", "nf4"),
        (["quantize.block_size=100"], "100", "64"),
        (["quantize.block_size=128"], "128", "give 64"),
        (["method.train_modules=[q_proj]", "method.targets=[v_proj]"], "q_proj is to be quantised", "method.targets"),
        (["quantize.modules={k_pro: int8}"], "'k_pro' is no module that is quantised", "did you mean 'k_proj'"),
        (["quantize.modules={lm_head: int8}"], "'lm_head' is no module that is quantised", "down_proj"),
        (["quantize.modules={layers.0: none}"], "part of the 2 layers that are stored together", "all layers"),
        (["quantize.modules={k_proj: int9}"], "quantize.modules.k_proj", "int8"),
        (["quantize.modules={k_proj: none}", "method.adapter=loftq", "method.dropout=0"], "k_proj is not", "targets"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(overrides, message, fix, model, texts, tmp_path):
    with pytest.raises(UserError) as caught:
        train(recipe(model, texts, tmp_path / "run", *overrides))
    assert message in str(caught.value)
    assert fix in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_modules_that_are_not_quantised_can_be_trained_in_full(model, texts, tmp_path):
    """The head and the norm of the exported adapter have moved by one update."""
    output = tmp_path / "run"
    train(recipe(model, texts, output, "method.train_modules=[lm_head, norm]", "train.steps=1"))
    with (
        safetensors.safe_open(output / "adapter" / "adapter_model.safetensors", "np") as trained,
        safetensors.safe_open(model / "model.safetensors", "np") as base,
    ):
        for name in ("lm_head.weight", "model.norm.weight"):
            change = np.abs(trained.get_tensor(f"base_model.model.{name}") - base.get_tensor(name))
            assert 1e-4 < change.max() < 1e-2  # AdamW's first update moves by the learning rate, 5e-3


def test_into_has_two_values(run, tmp_path):
    with pytest.raises(UserError, match="did you mean 'full'"):
        export(run, tmp_path / "merged", merge=True, into="ful")


@pytest.mark.slow
def test_into_is_for_adapters_of_quantised_bases(model, texts, tmp_path):
    plain = tmp_path / "run"
    train(recipe(model, texts, plain, "quantize=null", "train.steps=1"))
    with pytest.raises(UserError, match="not trained on a quantised base"):
        export(plain, tmp_path / "merged", merge=True, into="dequantised")
