"""The Triton kernels over a mesh and in a ring: values and gradients equal those of whole rows by torch in float64."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kernels import triton_ring_cases
from kernels.attention_oracle import torch_gradients
from kernels.triton_ring_cases import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "results.npz"
    program = pathlib.Path(triton_ring_cases.__file__)
    python_path = [str(program.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, python_path))}
    subprocess.run([sys.executable, str(program), str(path)], check=True, timeout=580, env=env)
    return np.load(path)


@pytest.mark.parametrize("name", CASES)
def test_sharded_rows_equal_whole_rows(name, results):
    """float32 sums, merged once more for each shard: the tolerance is that of one device, 2e-5."""
    case = CASES[name]
    q, k, v, g, segments, positions, start = case.arrays()
    expected = torch_gradients(q, k, v, g, case.tokens(segments, positions, start), **case.options)
    for n, x in enumerate(expected):
        np.testing.assert_allclose(results[f"{name}/{n}"], x, rtol=2e-5, atol=2e-5)
