"""Attention over meshes of 8 simulated devices, in float64, against torch on one."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kernels import mesh_attention_cases
from kernels.attention_oracle import reference, torch_gradients
from kernels.mesh_attention_cases import CASES

# Float64 sums of up to 256 terms of size one in another order: some 1e-15. In float32 2e-5, as on one device.
CLOSE = {"float64": 1e-12, "float32": 2e-5}


QUICK = [
    "packed over all of them",
    "padding, and a row of nothing else",
    "window and softcap",
    "fewer key heads than tp",
    "groups that tp cuts, direct",
    "rows that dp does not divide",
    "one new token",
]
OTHERS = [name for name in CASES if name not in QUICK]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return computed(QUICK, tmp_path_factory.mktemp("quick") / "results.npz")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return computed(OTHERS, tmp_path_factory.mktemp("others") / "results.npz")


def computed(names, file):
    program = pathlib.Path(mesh_attention_cases.__file__)
    ran = subprocess.run([sys.executable, program, file, *names], capture_output=True, text=True, timeout=540)
    assert ran.returncode == 0, ran.stderr
    with np.load(file) as found:
        return dict(found)


@pytest.mark.parametrize("name", QUICK)
def test_values_and_gradients_over_a_mesh_are_torchs_in_float64(name, quick):
    assert_torchs(name, quick)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_so_they_are_in_every_case(name, others):
    assert_torchs(name, others)


def assert_torchs(name, results):
    case = CASES[name]
    q, k, v, g, *rows = case.arrays()
    tokens, close = case.tokens(*rows), CLOSE[case.dtype]
    theirs = torch_gradients(q, k, v, g, tokens, **case.options)
    for n, expected in enumerate(theirs):
        mine = results[f"{name}/{n}"]
        assert mine.dtype == case.dtype
        np.testing.assert_allclose(mine, expected, rtol=close, atol=close)
    blind = tokens["q_segments"] == 0
    assert not results[f"{name}/0"][blind].any()


def test_the_rows_of_the_cases_are_the_definitions():
    """Torch's values, which the others are compared with, for a case with a row that sees nothing."""
    case = CASES["padding, and a row of nothing else"]
    q, k, v, g, *rows = case.arrays()
    tokens = case.tokens(*rows)
    expected = reference(q, k, v, **tokens, **case.options)
    np.testing.assert_allclose(torch_gradients(q, k, v, g, tokens, **case.options)[0], expected, rtol=1e-12, atol=1e-12)
