"""Baichuan2 on 8 simulated devices equals one device: W_pack by whole heads, its head by rows, biases round a ring."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from compiling import FASTER


@pytest.mark.parametrize(
    "size", [pytest.param(case, marks=pytest.mark.slow) for case in ("13B", "13B in a ring", "7B")]
)
def test_a_mesh_changes_nothing(size):
    """13B: LoRA and a trained head over nf4. 7B: full tuning; what it writes is what torch computes the loss of.

    Loaded numbers and written files are the same to the bit; float32 sums in other orders: 1e-4.
    """
    folder = pathlib.Path(__file__).parent
    flags = {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(folder / "baichuan_mesh_cases.py"), size]
    ran = subprocess.run(
        command, env=os.environ | flags | {"PYTHONPATH": str(folder.parent)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout)
    assert result["loaded"]
    assert result["written"]
    assert result.get("read", True)
    assert "tp" in result["split"][1]  # of [layers, heads x (q, k, v), embed]
    np.testing.assert_allclose(result["losses"], result["losses"][0], rtol=1e-5)
    assert max(result["errors"]) < 1e-4
