"""Attention over meshes of 8 simulated devices, in float64, against torch on one device."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from kernels import mesh_attention_cases
from kernels.attention_oracle import reference, torch_gradients
from kernels.mesh_attention_cases import CASES

# Float64 sums of up to 256 terms of size one in another order differ by some 1e-15. In float32 2e-5, as on one device.
CLOSE = {"float64": 1e-12, "float32": 2e-5}


FAST = [
    "packed over dp, cp and tp",
    "padding, and a row of padding only",
    "window and softcap",
    "fewer key heads than tp",
    "groups that tp cuts, direct",
    "rows that dp does not divide",
    "one new token",
    "sinks over dp, cp and tp",
    "one prompt over dp, cp and tp",
]
SLOW = [name for name in CASES if name not in FAST]


@pytest.fixture(scope="module")
def fast_results(tmp_path_factory):
    return compute(FAST, tmp_path_factory.mktemp("fast") / "results.npz")


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    return compute(SLOW, tmp_path_factory.mktemp("slow") / "results.npz")


def compute(names, file):
    program = pathlib.Path(mesh_attention_cases.__file__)
    ran = subprocess.run([sys.executable, program, file, *names], capture_output=True, text=True, timeout=540)
    assert ran.returncode == 0, ran.stderr
    with np.load(file) as results:
        return dict(results)


@pytest.mark.parametrize("name", FAST)
def test_values_and_gradients_over_a_mesh_equal_torchs_in_float64(name, fast_results):
    assert_equals_torch(name, fast_results)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_values_and_gradients_of_all_other_cases_equal_torchs(name, slow_results):
    assert_equals_torch(name, slow_results)


def assert_equals_torch(name, results):
    case = CASES[name]
    q, k, v, g, *rows = case.arrays()
    tokens, close = case.tokens(*rows), CLOSE[case.dtype]
    expected = torch_gradients(q, k, v, g, tokens, **case.options)
    for n, x in enumerate(expected):
        result = results[f"{name}/{n}"]
        assert result.dtype == case.dtype
        np.testing.assert_allclose(result, x, rtol=close, atol=close)
    padding = tokens["q_segments"] == 0
    assert not results[f"{name}/0"][padding].any()


def test_torchs_values_equal_the_definition_for_a_row_that_sees_nothing():
    case = CASES["padding, and a row of padding only"]
    q, k, v, g, *rows = case.arrays()
    tokens = case.tokens(*rows)
    expected = reference(q, k, v, **tokens, **case.options)
    np.testing.assert_allclose(torch_gradients(q, k, v, g, tokens, **case.options)[0], expected, rtol=1e-12, atol=1e-12)
