"""gpt-oss checkpoints with mxfp4 experts, against transformers with their dequantised numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from families.case import directory, our_logits, torch_logits, torch_model
from families.cases import BY_NAME
from families.published_checkpoints import mxfp4, rewritten
from meshtune.arrays.tree import flatten
from meshtune.families import tensors
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_params, load_spec

CASE = BY_NAME["gpt_oss"].changed(hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(directory(CASE), tmp_path_factory.mktemp("mxfp4") / "model", *mxfp4())


def wide(checkpoint: Path) -> dict[str, torch.Tensor]:
    stored = load_file(checkpoint / "model.safetensors")
    numbers = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        blocks, scales = (stored[f"{name}_{part}"] for part in ("blocks", "scales"))
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return numbers


@pytest.mark.parametrize("quantize", [None, QuantizeConfig("none")], ids=["codes", "wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_transformers(checkpoint: Path, dtype: str, quantize: QuantizeConfig | None):
    spec, _ = load_spec(checkpoint, dtype)
    params, expected = flatten(load_params(checkpoint, spec, quantize=quantize)), wide(checkpoint)
    coded = {path for path, leaf in params.items() if isinstance(leaf, QuantisedWeight)}
    assert coded == (
        {path for path in params if "experts" in path and path.endswith("weight")} if not quantize else set()
    )
    for entry in tensors(spec):
        leaf = params[entry.path]
        numbers = np.asarray(leaf.dequantise() if isinstance(leaf, QuantisedWeight) else leaf)[entry.index]
        theirs = entry.view.read(expected[entry.name].float().numpy())
        np.testing.assert_array_equal(numbers.astype(np.float32), theirs.astype(numbers.dtype).astype(np.float32))


@pytest.mark.parametrize("quantize", [None, QuantizeConfig("none")], ids=["codes", "wide"])
def test_logits_are_those_of_transformers_with_the_same_numbers(checkpoint: Path, quantize: QuantizeConfig | None):
    model = torch_model(CASE)
    model.load_state_dict({name: tensor.float() for name, tensor in wide(checkpoint).items()})
    spec, _ = load_spec(checkpoint, "float32")
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (2, 40))
    positions = np.broadcast_to(np.arange(40), (2, 40))
    params = load_params(checkpoint, spec, quantize=quantize)
    ours = our_logits(params, spec, tokens, positions, np.ones_like(tokens))
    np.testing.assert_allclose(ours, torch_logits(model, tokens), atol=1e-4)
