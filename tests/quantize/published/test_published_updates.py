"""LoRA over the codes of a checkpoint gives the updates of LoRA over the dequantised numbers, on every mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from families import mesh_updates
from families.case import Case, directory
from families.cases import BY_NAME
from families.published_checkpoints import block_fp8, from_block_fp8, mxfp4, rewritten
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_spec

BLOCK = (16, 16)
EVEN = {"hidden_size": 64, "vocab_size": 96}
CASES: dict[str, tuple[Case, str]] = {
    "fp8": (
        BY_NAME["deepseek_v3"].changed(**EVEN, v_head_dim=16, moe_intermediate_size=32, intermediate_size=64),
        '"all-linear"',
    ),
    "mxfp4": (BY_NAME["gpt_oss"].changed(**EVEN, intermediate_size=64), '"all-linear"'),
}


@pytest.fixture(scope="module", params=["fp8", pytest.param("mxfp4", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    case, targets = CASES[request.param]
    quantise, config = block_fp8(BLOCK) if request.param == "fp8" else mxfp4()
    return rewritten(directory(case), tmp_path_factory.mktemp(request.param) / "model", quantise, config), targets


def as_wide(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with its codes dequantised."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, numbers = load_file(checkpoint / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            numbers[stem] = convert_moe_packed_tensors(tensor, stored[f"{stem}_scales"]).float()
        elif tensor.dtype == torch.float8_e4m3fn:
            numbers[name] = from_block_fp8(tensor, stored[f"{name}_scale_inv"], BLOCK)
        elif not name.endswith(("_scales", "_scale_inv")):
            numbers[name] = tensor
    folder.mkdir()
    save_file(numbers, folder / "model.safetensors")
    fields = json.loads((checkpoint / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.slow
def test_updates_over_codes_are_those_over_the_numbers(checkpoint: tuple[Path, str], tmp_path: Path):
    path, targets = checkpoint
    over_codes = mesh_updates.trajectory(path, targets, None)
    over_numbers = mesh_updates.trajectory(as_wide(path, tmp_path / "wide"), targets, None)
    for name, numbers in over_codes.items():  # the same program but for where the weights come from
        np.testing.assert_allclose(numbers, over_numbers[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["all", "attention"])
def test_updates_on_a_mesh_are_those_of_one_device(checkpoint: tuple[Path, str], modules: str):
    path, targets = checkpoint
    targets = targets if modules == "all" else '["o_proj"]'
    meshes = [{"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "ep": 2}]
    command = [sys.executable, str(Path(mesh_updates.__file__)), str(path), targets, json.dumps(meshes), "float32"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    single, *many = json.loads(done.stdout.splitlines()[-1])
    for mesh, updates in zip(meshes, many, strict=True):
        for name, numbers in updates.items():
            np.testing.assert_allclose(
                numbers, single[name], rtol=1e-4, err_msg=f"{name} on {mesh}"
            )  # sums in another order


def test_weights_in_codes_take_the_bytes_of_their_codes(checkpoint: tuple[Path, str]):
    path, targets = checkpoint
    spec, _ = load_spec(path)
    frozen = flatten(abstract(LoraConfig(targets=json.loads(targets)), spec).frozen)
    coded = {name: leaf for name, leaf in frozen.items() if isinstance(leaf, QuantisedWeight)}
    experts = [leaf for name, leaf in coded.items() if "/experts/" in name]
    assert len(experts) == 3 * sum("/experts/down" in name for name in coded) > 0
    bits = {"e4m3": (8, 32), "mxfp4": (4, 8)}
    for leaf in coded.values():
        of_code, of_scale = bits[leaf.format]
        assert 8 * leaf.codes.nbytes == of_code * leaf.size
        assert 8 * leaf.scales.nbytes * leaf.block_size == of_scale * leaf.size


def test_codes_are_not_trained_and_not_quantised_again_unless_asked(checkpoint: tuple[Path, str]):
    spec, _ = load_spec(checkpoint[0])
    method = LoraConfig(targets=json.loads(checkpoint[1]))
    with pytest.raises(UserError, match=r"no gradient(.|\n)*quantize: none"):
        abstract(FullConfig(), spec)
    assert abstract(FullConfig(), spec, quantize=QuantizeConfig("none")).trainable
    with pytest.raises(UserError, match=r"quantised already(.|\n)*requantise"):
        abstract(method, spec, quantize=QuantizeConfig("nf4", 8))
    again = abstract(method, spec, quantize=QuantizeConfig("nf4", 8, requantise=True))
    formats = {leaf.format for leaf in flatten(again.frozen).values() if isinstance(leaf, QuantisedWeight)}
    assert formats == {"nf4"}
