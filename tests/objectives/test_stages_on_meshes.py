"""Stages of pairs, labels and completions on four and eight simulated devices equal one device: all axes split."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from compiling import FASTER

STAGES = {
    "dpo": {"ld_alpha": 0.3, "sft_weight": 0.5},
    "kto": {},
    "rm": {"centre": 0.1},
    "distill": {"loss": "jsd", "beta": 0.3},
    "distill from a server": {"loss": "jsd", "beta": 0.3, "served": True},
    "ppo": {},
    "grpo": {"loss": "grpo", "ratio": "sequence", "beta": 0.1, "entropy_coef": 0.3},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", STAGES)
def test_a_mesh_changes_nothing(stage):
    """Float32 sums in other orders: 1e-4 of losses, metrics and the norms of all gradients."""
    folder = pathlib.Path(__file__).parent
    flags = {"XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=8"}
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    command = [sys.executable, str(folder / "mesh_cases.py"), json.dumps({stage.split()[0]: STAGES[stage]})]
    ran = subprocess.run(command, env=os.environ | flags | paths, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    single, *meshes = json.loads(ran.stdout)[stage.split()[0]]
    assert max(single["norms"]) > 1e-3
    for result in meshes:
        for name, value in single.items():
            np.testing.assert_allclose(result[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
