"""Checkpoints with block-scaled fp8 weights, against the same numbers in torch."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from families.case import directory, our_logits, torch_logits, torch_model
from families.cases import BY_NAME
from families.published_checkpoints import block_fp8, from_block_fp8, rewritten
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.inspect import inspect_model
from meshtune.weights.load import load_params, load_spec

BLOCK = (16, 8)
CASE = BY_NAME["deepseek_v3"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(directory(CASE), tmp_path_factory.mktemp("fp8") / "model", *block_fp8(BLOCK))


def wide(checkpoint: Path) -> dict[str, torch.Tensor]:
    stored = load_file(checkpoint / "model.safetensors")
    return {
        name: from_block_fp8(tensor, stored[f"{name}_scale_inv"], BLOCK)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }


@pytest.mark.parametrize("quantize", [None, QuantizeConfig("none")], ids=["codes", "wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_codes_times_scales_rounded_once(checkpoint: Path, dtype: str, quantize: QuantizeConfig | None):
    spec, _ = load_spec(checkpoint, dtype)
    params, expected = flatten(load_params(checkpoint, spec, quantize=quantize)), wide(checkpoint)
    coded = {path for path, leaf in params.items() if isinstance(leaf, QuantisedWeight)}
    assert bool(coded) == (quantize is None)
    for path in coded:
        params[path] = params[path].dequantise()
    for entry in tensors(spec):
        numbers = entry.view.read(expected[entry.name].numpy())
        if dtype == "bfloat16" and entry.array.role != "buffer":
            numbers = numbers.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(params[entry.path])[entry.index], numbers, err_msg=entry.name)


def test_logits_are_those_of_transformers_with_the_same_numbers(checkpoint: Path):
    model = torch_model(CASE)
    model.load_state_dict(
        {name: tensor for name, tensor in _in_memory(wide(checkpoint)).items() if name in model.state_dict()}
    )
    spec, _ = load_spec(checkpoint, "float32")
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (2, 40))
    positions = np.broadcast_to(np.arange(40), (2, 40))
    ours = our_logits(load_params(checkpoint, spec), spec, tokens, positions, np.ones_like(tokens))
    np.testing.assert_allclose(ours, torch_logits(model, tokens), atol=1e-4)


def _in_memory(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers has them in memory."""
    state = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    layers = sorted({name.split(".experts.")[0] for name in stored if ".experts." in name})
    for layer in layers:

        def of(kind: str, layer: str = layer) -> torch.Tensor:
            count = sum(name.startswith(f"{layer}.experts.") and name.endswith(f"{kind}.weight") for name in stored)
            return torch.stack([stored[f"{layer}.experts.{n}.{kind}.weight"] for n in range(count)])

        state[f"{layer}.experts.gate_up_proj"] = torch.cat([of("gate_proj"), of("up_proj")], 1)
        state[f"{layer}.experts.down_proj"] = of("down_proj")
    return state


def test_a_summary_names_the_method(checkpoint: Path):
    assert set(inspect_model(checkpoint).dtypes) == {"fp8", "float32"}


def change_checkpoint(checkpoint: Path, folder: Path, change) -> Path:
    stored = load_file(checkpoint / "model.safetensors")
    fields = json.loads((checkpoint / "config.json").read_text())
    change(stored, fields)
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored, fields: stored.pop(f"{DOWN}_scale_inv"), f"'{DOWN}_scale_inv' is missing"),
        (lambda stored, fields: stored.pop(DOWN), f"'{DOWN}' is missing"),
        (
            lambda stored, fields: stored.update({f"{DOWN}_scale_inv": torch.ones(3, 3)}),
            f"'{DOWN}' do not fit together: its scales have shape [3, 3], expected [2, 7]",
        ),
        (lambda stored, fields: stored.update({DOWN: stored[DOWN].float()}), "dtype F32, expected F8_E4M3"),
        (lambda stored, fields: fields.pop("quantization_config"), "_scale_inv"),
        (lambda stored, fields: fields["quantization_config"].update(quant_method="aqlm"), "'aqlm' is not read"),
        (lambda stored, fields: fields["quantization_config"].update(fmt="e5m2"), "fmt = 'e5m2'"),
        (lambda stored, fields: fields["quantization_config"].update(rotation="hadamard"), "rotation"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint: Path, tmp_path: Path, change, message: str):
    folder = change_checkpoint(checkpoint, tmp_path / "bad", change)
    with pytest.raises(UserError) as error:
        load_params(folder, load_spec(folder)[0])
    assert message in str(error.value)
