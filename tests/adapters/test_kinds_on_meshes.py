"""Every kind of adapter over fsdp=4, tp=2 is what it is on one device: where it begins, its loss, its gradients."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import adapter_mesh_cases
import numpy as np
import pytest

from compiling import FASTER

# Float32 sums in other orders; of decompositions, other rounding over the gaps between singular values.
CLOSE = 2e-4


def compare_meshes(names: list[str]) -> None:
    program = pathlib.Path(adapter_mesh_cases.__file__)
    flags = {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(program), json.dumps(names)]
    ran = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name, single, mesh in map(json.loads, ran.stdout.splitlines()):
        assert max(single["norms"]) > 1e-3, name
        for quantity, expected in single.items():
            np.testing.assert_allclose(mesh[quantity], expected, rtol=CLOSE, atol=1e-6, err_msg=f"{name}: {quantity}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", adapter_mesh_cases.CASES)
def test_a_mesh_changes_nothing(name: str):
    compare_meshes([name])
