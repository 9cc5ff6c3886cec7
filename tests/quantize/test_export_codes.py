"""Exports of the codes that were trained over: nf4 as a bitsandbytes checkpoint, int4 as a compressed-tensors one."""

from __future__ import annotations

import json
import pathlib

import bitsandbytes
import bitsandbytes.functional
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers

from meshtune.arrays.tree import flatten
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.export import export
from meshtune.train.run import train
from meshtune.weights.load import load_params, load_spec
from quantize.small_models import MIXTURES, TOKENIZER, quantised_weights, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", "llama", torch.bfloat16)


def test_transformers_and_bitsandbytes_read_the_codes_bit_for_bit(model, tmp_path):
    done = export(model, tmp_path / "nf4", format="bitsandbytes")
    assert "14 weights in codes" in done.verified
    ours = quantised_weights(model, QuantizeConfig("nf4"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nf4")
    linear = {name: m for name, m in theirs.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert {f"{name}.weight" for name in linear} == set(ours)
    for name, module in linear.items():
        weight, state = ours[f"{name}.weight"], module.weight.quant_state
        np.testing.assert_array_equal(module.weight.data.numpy().reshape(-1), np.asarray(weight.codes).reshape(-1))
        np.testing.assert_array_equal(state.absmax.numpy(), np.asarray(weight.scales).reshape(-1))
        np.testing.assert_array_equal(state.state2.absmax.numpy(), np.asarray(weight.nested))
        back = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
        np.testing.assert_array_equal(back.float().numpy(), np.asarray(weight.dequantise("bfloat16"), np.float32))


def test_what_is_written_is_read_again_as_the_codes_that_were_trained_over(model, tmp_path):
    export(model, tmp_path / "nf4", format="bitsandbytes")
    spec, _ = load_spec(tmp_path / "nf4")
    assert spec.published is not None
    again = flatten(load_params(tmp_path / "nf4", spec))
    before = flatten(load_params(model, load_spec(model)[0], quantize=QuantizeConfig("nf4")))
    for path, leaf in before.items():
        numbers = (item.dequantise() if isinstance(item, QuantisedWeight) else item for item in (leaf, again[path]))
        np.testing.assert_array_equal(*(np.asarray(array, np.float32) for array in numbers))


def test_tensors_that_hold_several_matrices_are_written_whole(tmp_path):
    fused = save_model(tmp_path / "phi3", "phi3", torch.float32, pad_token_id=0)
    done = export(fused, tmp_path / "nf4", format="bitsandbytes")
    assert "8 weights in codes" in done.verified
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nf4")
    spec, _ = load_spec(fused)
    leaves = flatten(load_params(fused, spec, quantize=QuantizeConfig("nf4")))
    numbers: dict[str, np.ndarray] = {}
    for entry in tensors(spec):
        if isinstance(leaf := leaves[entry.path], QuantisedWeight):
            tensor = numbers.setdefault(entry.name, np.zeros(entry.view.tensor, np.float32))
            entry.view.write(np.asarray(leaf.dequantise()[entry.index]), tensor)
    assert "model.layers.0.self_attn.qkv_proj.weight" in numbers
    for name, tensor in numbers.items():
        module = theirs.get_submodule(name.removesuffix(".weight"))
        back = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        np.testing.assert_array_equal(back.numpy(), tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_is_what_compressed_tensors_dequantises(dtype, tmp_path):
    folder = save_model(tmp_path / "model", "llama", dtype)
    export(folder, tmp_path / "int4", format="compressed-tensors")
    stored = safetensors.numpy.load_file(tmp_path / "int4/model.safetensors")
    config = json.loads((tmp_path / "int4/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert "lm_head" in config["ignore"]
    # The scales are rounded to the model's dtype: half a unit in the last place of bfloat16 is 2**-9.
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-22
    for name, weight in quantised_weights(folder, QuantizeConfig("int4")).items():
        stem = name.removesuffix(".weight")
        numbers = unpack_int4(stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"].astype(np.float32))
        np.testing.assert_allclose(numbers, np.asarray(weight.dequantise("float32")), rtol=tolerance)
        assert stored[f"{stem}.weight_shape"].tolist() == list(weight.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), *MIXTURES.items()]
)
def test_transformers_computes_the_same_with_the_int4_checkpoint(family, sizes, tmp_path):
    pytest.importorskip("compressed_tensors", reason="transformers reads these checkpoints by that package")
    folder = save_model(tmp_path / "model", family, torch.float32, **sizes)
    export(folder, tmp_path / "int4", format="compressed-tensors")
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=torch.float32)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    for name, weight in quantised_weights(folder, QuantizeConfig("int4")).items():
        state[name] = torch.tensor(np.asarray(weight.dequantise("float32")))
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        difference = (served(ids).logits - expected(ids).logits).norm() / expected(ids).logits.norm()
    assert difference < 1e-5  # float32, and scales that are a seventh of ours


def test_a_head_that_is_tied_to_the_embedding_is_left_out(tmp_path):
    folder = save_model(tmp_path / "model", "llama", torch.float32, tie_word_embeddings=True)
    export(folder, tmp_path / "int4", format="compressed-tensors")
    config = json.loads((tmp_path / "int4/config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"]
    export(folder, tmp_path / "nf4", format="bitsandbytes")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nf4").lm_head) is torch.nn.Linear


def unpack_int4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers by compressed-tensors itself where it is installed, else by its definition: 4-bit integers, lowest
    bits first, 8 above their value, times their group's scale."""
    columns = packed.shape[1] * 8
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    except ImportError:
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        integers = ((packed.view(np.uint32)[..., None] >> shifts) & 15).reshape(len(packed), -1).astype(np.float32) - 8
    else:
        integers = unpack_from_int32(torch.from_numpy(packed), 4, torch.Size((len(packed), columns))).float().numpy()
    return (integers.reshape(len(packed), scales.shape[1], -1) * scales[..., None]).reshape(len(packed), columns)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "bitsandbyte"}, "there is no format 'bitsandbyte'"),
        ({"format": "bitsandbytes", "dtype": "float32"}, "writes codes of nf4"),
        ({"format": "bitsandbytes", "merge": True}, "writes codes of nf4"),
    ],
)
def test_what_no_codes_can_be_written_of_is_refused(model, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        export(model, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def dequantise_model(checkpoint: pathlib.Path, model: pathlib.Path) -> transformers.PreTrainedModel:
    """A model with the numbers that bitsandbytes reads in a checkpoint; its own products on a CPU are rougher."""
    coded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, module in coded.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            numbers = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.data = numbers.float()
    return plain


@pytest.mark.slow
def test_an_adapter_over_the_written_base_computes_what_was_trained(tmp_path):
    import peft

    model = save_model(tmp_path / "model", "llama", torch.float32)
    recipe = {
        "model": {"path": str(model)},
        "data": {"train": str(TOKENIZER.parent / "lesson.jsonl"), "max_length": 64, "train.format": None},
        "output": str(tmp_path / "run"),
        "quantize": "nf4",
        "train": {"steps": 6, "batch_size": 2},
        "optimizer": {"learning_rate": 1e-2},
        "compute": {"precision": "float32"},
    }
    recipe["data"].pop("train.format")
    recipe["data"]["train"] = [{"path": recipe["data"]["train"], "format": "prompt_completion"}]
    run = tmp_path / "run"
    train(load_recipe(recipe))
    with pytest.raises(UserError, match="holds int4"):
        export(run, tmp_path / "no", format="compressed-tensors")
    export(run, tmp_path / "base", format="bitsandbytes")
    base = dequantise_model(tmp_path / "base", model)
    served = peft.PeftModel.from_pretrained(base, run / "adapter")
    export(run, tmp_path / "merged", merge=True, dtype="float32")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected, got = trained(ids).logits, served(ids).logits
    # The same codes and adapter; the products are made in another order (float32).
    error = ((got - expected).square().mean() / expected.square().mean()).sqrt().item()
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        nf4_error = ((plain(ids).logits - expected).square().mean() / expected.square().mean()).sqrt().item()
    assert error < 1e-4 < 0.05 < nf4_error
    done = export(run, tmp_path / "merged-nf4", merge=True, format="bitsandbytes")
    again = dequantise_model(tmp_path / "merged-nf4", model)
    with torch.no_grad():
        moved = ((again(ids).logits - expected).square().mean() / expected.square().mean()).sqrt().item()
    assert 1e-4 < moved < 2 * nf4_error
    assert "bitsandbytes checkpoint" in done.what
