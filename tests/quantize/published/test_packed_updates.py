"""LoRA over published codes of 4 and 8 bits gives the updates of LoRA over their numbers, on every mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from families import mesh_updates
from families.case import Case, directory
from families.packed_checkpoints import PACKED
from families.published_checkpoints import rewritten
from meshtune.weights.load import load_spec
from meshtune.weights.packed import model_tensors
from meshtune.weights.tensor_reader import TensorReader

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
SLOW = ("nf4_double", "gptq_8bit", "eight_bit")
CODES = ["awq", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
CASE = Case("packed_updates", "llama", SIZES)


@pytest.fixture(scope="module", params=CODES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(directory(CASE), tmp_path_factory.mktemp(request.param) / "model", *PACKED[request.param])


def as_wide(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with its codes dequantised."""
    infos = model_tensors(checkpoint, load_spec(checkpoint)[0].published)
    folder.mkdir()
    with TensorReader() as reader:
        save_file({name: reader.tensor(info) for name, info in infos.items()}, folder / "model.safetensors")
    fields = json.loads((checkpoint / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_updates_over_codes_are_those_over_the_numbers(checkpoint: Path, tmp_path: Path):
    over_codes = mesh_updates.trajectory(checkpoint, '"all-linear"', None)
    over_numbers = mesh_updates.trajectory(as_wide(checkpoint, tmp_path / "wide"), '"all-linear"', None)
    for name, numbers in over_codes.items():  # the same program but for where the weights come from
        np.testing.assert_allclose(numbers, over_numbers[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_updates_on_a_mesh_are_those_of_one_device(checkpoint: Path):
    meshes = [{"fsdp": 2, "tp": 2}, {"fsdp": 4}]
    command = [sys.executable, str(Path(mesh_updates.__file__)), str(checkpoint), '"all-linear"', json.dumps(meshes)]
    source = os.pathsep.join([str(Path(mesh_updates.__file__).parents[1]), *sys.path])
    environment = os.environ | {"PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    single, *many = json.loads(done.stdout.splitlines()[-1])
    for mesh, updates in zip(meshes, many, strict=True):
        for name, numbers in updates.items():
            np.testing.assert_allclose(numbers, single[name], rtol=2e-4, err_msg=f"{mesh} {name}")
