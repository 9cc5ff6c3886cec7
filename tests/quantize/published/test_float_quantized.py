"""compressed-tensors' fp8: a scale for the tensor, for each row and for each block."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from families.case import Case, directory
from families.published_checkpoints import rewritten
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.published import read_scheme
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_params, load_spec

CASE = Case("llama_float_quantized", "llama", {"num_hidden_layers": 2, "intermediate_size": 64})
BLOCKS = {"tensor": None, "channel": (1, None), "block": (16, 8)}


def config(strategy: str) -> dict:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights | {"block_structure": [16, 8]}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*o_proj$"],
    }


def quantise(strategy: str):
    def of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith("_proj.weight") or "o_proj" in name:
            return None
        high, wide = {"tensor": tensor.shape, "channel": (1, tensor.shape[1]), "block": (16, 8)}[strategy]
        blocks = tensor.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        scales = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
        codes = (blocks / scales.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        stem = name.removesuffix(".weight")
        shape = (1,) if strategy == "tensor" else scales.shape
        return {name: codes.reshape(tensor.shape), f"{stem}.weight_scale": scales.reshape(shape)}

    return of


@pytest.fixture(scope="module", params=list(BLOCKS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return rewritten(directory(CASE), folder, quantise(request.param), config(request.param))


@pytest.mark.parametrize("quantize", [None, QuantizeConfig("none")], ids=["codes", "wide"])
def test_weights_are_codes_times_scales(checkpoint: Path, quantize: QuantizeConfig | None):
    spec, _ = load_spec(checkpoint, "bfloat16")
    params, stored = (
        flatten(load_params(checkpoint, spec, quantize=quantize)),
        load_file(checkpoint / "model.safetensors"),
    )
    coded = {path.split("/")[-2] for path, leaf in params.items() if isinstance(leaf, QuantisedWeight)}
    assert coded == ({"q", "k", "v", "gate", "up", "down"} if quantize is None else set())
    for entry in tensors(spec):
        leaf, numbers = params[entry.path], stored[entry.name].float()
        if (scales := stored.get(f"{entry.name}_scale")) is not None:
            rows, columns = (1, 1) if scales.numel() == 1 else scales.shape
            numbers = numbers.unflatten(0, (rows, -1)).unflatten(2, (columns, -1))
            numbers = (numbers * scales.float().reshape(rows, 1, columns, 1)).reshape(stored[entry.name].shape)
        ours = np.asarray(leaf.dequantise() if isinstance(leaf, QuantisedWeight) else leaf)[entry.index]
        np.testing.assert_array_equal(ours, numbers.numpy().astype(ml_dtypes.bfloat16), err_msg=entry.name)


def test_other_kinds_are_named():
    bad = config("channel")
    bad["config_groups"]["group_0"]["weights"]["strategy"] = "tensor_group"
    with pytest.raises(UserError, match="tensor_group"):
        read_scheme({"quantization_config": bad}, "config.json")
