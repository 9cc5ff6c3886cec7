"""Experts in the codes that they were trained over: the files written of them, and what other programs read there."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import bitsandbytes.functional
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.formats import STORED
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs import export_quantised
from meshtune.runs.export import export
from meshtune.weights.load import load_params, load_spec
from quantize.small_models import MIXTURES, quantised_weights, save_model


def test_experts_in_int4_are_a_weight_each_and_read_again_code_by_code(tmp_path):
    folder = save_model(tmp_path / "model", "mixtral", torch.bfloat16, **MIXTURES["mixtral"])
    done = export(folder, tmp_path / "int4", format="compressed-tensors")
    assert "32 weights in codes" in done.verified
    tensors_written = safetensors.numpy.load_file(tmp_path / "int4/model.safetensors")
    config = json.loads((tmp_path / "int4/config.json").read_text())["quantization_config"]
    router = "model.layers.1.block_sparse_moe.gate"
    assert router in config["ignore"]
    assert f"{router}.weight" in tensors_written
    expert = "model.layers.1.block_sparse_moe.experts.3"
    assert {f"{expert}.{name}.weight_packed" for name in ("w1", "w2", "w3")} < tensors_written.keys()
    before, again = (
        flatten(load_params(path, load_spec(path)[0], quantize=config))
        for path, config in ((folder, QuantizeConfig("int4")), (tmp_path / "int4", None))
    )
    coded = {path for path, leaf in before.items() if isinstance(leaf, QuantisedWeight)}
    assert {path.split("/")[-2] for path in coded} == {"q", "k", "v", "o", "gate", "up", "down"}
    for path in coded:
        zeros = np.repeat(np.asarray(again[path].zeros, np.float32), again[path].block_size, axis=-1)
        theirs = np.asarray(STORED[again[path].format].decode(again[path].codes), np.float32) - zeros
        np.testing.assert_array_equal(theirs, np.asarray(STORED["int4"].decode(before[path].codes) * 7).round())


def test_experts_that_are_stored_together_are_written_one_by_one(tmp_path):
    folder = save_model(tmp_path / "model", "mixtral", torch.bfloat16, **MIXTURES["mixtral"])
    together = pathlib.Path(shutil.copytree(folder, tmp_path / "together"))
    layers = safetensors.torch.load_file(folder / "model.safetensors")
    for layer in range(2):
        block, mlp = (f"model.layers.{layer}.{name}" for name in ("block_sparse_moe", "mlp"))
        w1, w2, w3 = (
            [layers.pop(f"{block}.experts.{n}.{matrix}.weight") for n in range(4)] for matrix in ("w1", "w2", "w3")
        )
        layers[f"{mlp}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
        layers[f"{mlp}.experts.down_proj"] = torch.stack(w2)
        layers[f"{mlp}.gate.weight"] = layers.pop(f"{block}.gate.weight")
    safetensors.torch.save_file(layers, together / "model.safetensors", {"format": "pt"})
    for source in (folder, together):
        export(source, tmp_path / f"{source.name}-int4", format="compressed-tensors")
    first, second = (
        safetensors.numpy.load_file(tmp_path / f"{source.name}-int4/model.safetensors") for source in (folder, together)
    )
    assert first.keys() == second.keys()
    for name, numbers in first.items():
        np.testing.assert_array_equal(numbers, second[name])


@pytest.mark.slow
def test_bitsandbytes_dequantises_each_experts_codes_to_what_was_trained_over(tmp_path):
    folder = save_model(tmp_path / "model", "mixtral", torch.bfloat16, **MIXTURES["mixtral"])
    done = export(folder, tmp_path / "nf4", format="bitsandbytes")
    assert "transformers 5 does not read experts in nf4" in done.verified
    tensors_written = safetensors.torch.load_file(tmp_path / "nf4/model.safetensors")
    experts = {name: w for name, w in quantised_weights(folder, QuantizeConfig("nf4")).items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    for name, weight in experts.items():
        parts = {key: value for key, value in tensors_written.items() if key.startswith(f"{name}.")}
        state = bitsandbytes.functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        back = bitsandbytes.functional.dequantize_4bit(tensors_written[name], state)
        np.testing.assert_array_equal(back.float().numpy(), np.asarray(weight.dequantise("bfloat16"), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "modules", "message"),
    [
        ("mixtral", {"w2": "none"}, "w3.weight' is quantised and '.*w2.weight' is not"),
        ("granitemoe", {}, "input_linear.weight' holds all experts of a layer"),
    ],
)
def test_experts_that_loaders_of_codes_do_not_read_are_refused(family, modules, message, tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model", family, torch.bfloat16, num_local_experts=4, num_experts_per_tok=2)
    config = QuantizeConfig("int4", modules=modules)
    monkeypatch.setattr(export_quantised, "_config", lambda adapter, writer: config)
    with pytest.raises(UserError, match=message):
        export(folder, tmp_path / "out", format="compressed-tensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_experts_that_were_not_trained_over_codes_stay_as_they_are(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model", "mixtral", torch.bfloat16, **MIXTURES["mixtral"])
    monkeypatch.setattr(
        export_quantised, "_config", lambda adapter, writer: QuantizeConfig("int4", modules={"experts": "none"})
    )
    done = export(folder, tmp_path / "int4", format="compressed-tensors")
    assert "8 weights in codes" in done.verified
    assert "transformers 5 does not read a mixture in int4 whose experts are not" in done.verified
    ignored = json.loads((tmp_path / "int4/config.json").read_text())["quantization_config"]["ignore"]
    # The names by which vLLM and SGLang ask for a layer's experts.
    names = [f"model.layers.0.block_sparse_moe.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    for name in names:
        assert any(re.match(entry[3:], name) for entry in ignored if entry.startswith("re:"))
    shared = "model.layers.0.mlp.shared_experts.gate_proj"
    assert not any(re.match(entry[3:], shared) for entry in ignored if entry.startswith("re:"))
