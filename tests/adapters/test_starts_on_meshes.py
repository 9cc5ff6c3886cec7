"""New layers, an adapter gone on with (rows of tokens and LoRA+ included), on nf4 bases: meshes equal one device."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from compiling import FASTER

SPLIT = {"fsdp": 2, "tp": 2}


def run_cases(kind: str, *meshes: dict[str, int], verified: bool = False) -> list[dict]:
    folder = pathlib.Path(__file__).parent
    flags = {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command = [
        sys.executable,
        str(folder / "start_mesh_cases.py"),
        kind,
        json.dumps(meshes),
        *(["verified"] if verified else []),
    ]
    ran = subprocess.run(command, env=os.environ | flags | paths, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)[kind]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        pytest.param("continued", [SPLIT], marks=pytest.mark.slow),
        pytest.param("llama_pro", [SPLIT], marks=pytest.mark.slow),
        pytest.param("continued", [{"fsdp": 8}, {"fsdp": 2, "cp": 2, "tp": 2}], marks=pytest.mark.slow),
        pytest.param("llama_pro", [{"fsdp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}], marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing(kind: str, meshes: list[dict[str, int]]):
    """Three updates; float32 sums in other orders, which AdamW's first updates enlarge where a gradient is near zero:
    1e-4 of losses and 1e-3 of sums of parameters."""
    single, *sharded_runs = run_cases(kind, *meshes, verified=len(meshes) > 1)
    assert single["losses"][2] < single["losses"][0]
    for sharded in sharded_runs:
        np.testing.assert_allclose(sharded["losses"], single["losses"], rtol=1e-4)
        np.testing.assert_allclose(sharded["sums"], single["sums"], rtol=1e-3)
