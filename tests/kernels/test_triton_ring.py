"""The Triton kernels over a mesh and in a ring: whole rows' values and gradients, by torch in float64."""

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
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "results.npz"
    program = pathlib.Path(triton_ring_cases.__file__)
    env = os.environ | {"PYTHONPATH": str(program.parents[1])}
    subprocess.run([sys.executable, str(program), str(path)], check=True, timeout=580, env=env)
    return np.load(path)


@pytest.mark.parametrize("name", CASES)
def test_split_rows_give_what_whole_rows_give(name, found):
    """float32 sums, put together once more for each part: the tolerance of one device, 2e-5."""
    case = CASES[name]
    q, k, v, g, segments, positions, start = case.arrays()
    exact = torch_gradients(q, k, v, g, case.tokens(segments, positions, start), **case.options)
    for n, theirs in enumerate(exact):
        np.testing.assert_allclose(found[f"{name}/{n}"], theirs, rtol=2e-5, atol=2e-5)
