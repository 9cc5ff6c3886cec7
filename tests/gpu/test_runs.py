"""Whole short runs of every method, quantised format, optimizer and kind of offloading, against the CPU in float32.

Each is three updates, a result that is loaded again, logits, and greedy decoding. On the CPU, runs in mixed precision
are compared with those in float32.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
import run_cases
from platforms import on_both
from run_cases import CASES, UPDATES

# Of losses and gradient norms (relative), and of logits (of the largest). In float32 both sides make the same products,
# exact to 1e-6, in other orders, and three updates may magnify that; in mixed precision every product's inputs are
# rounded to 2^-9.
ALLOWED = {"float32": (2e-4, 1e-3, 2e-3), "mixed": (3e-2, 1e-1, 1e-1)}
# Their first updates are about the sign of each gradient, so that numbers near zero may take either.
SIGNS = {"lion, full", "muon, full", "adam_mini, full", "sophia, full", "prodigy, full"}
# Decompositions may differ by a rotation, which a few updates of the factors make visible.
LOOSE = {"pissa", "loftq on int8", "galore, full", "apollo, full", *SIGNS}
LOOSER = 10
RUNS = [(name, precision) for name in CASES for precision in ALLOWED]
SLOW = [(name, "mixed") for name in CASES]  # on the CPU; tests/quantize/test_quantised_runs.py is the fast tier's
# Programs of a second need no choice among kernels, which takes longer than they.
GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
TIME = 2400  # seconds of a process that runs all cases


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> pathlib.Path:
    """A random Llama of 520 tokens, with the quickstart's tokenizer and chat template."""
    return save_model_for_runs(tmp_path_factory.mktemp("gpu") / "llama")


@pytest.fixture(scope="session")
def results(model, tmp_path_factory):
    """results(platform, precision, name, names): what a case gives on a platform.

    Where this process cannot compute on that platform as well, another one runs all of `names` at once.
    """
    folder = tmp_path_factory.mktemp("results")

    @functools.cache
    def of_case(precision: str, name: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MESHTUNE_CACHE", str(folder / "cache"))
            return run_cases.run(name, model, precision, tmp_path_factory.mktemp("run"))

    def of_process(platform: str, precision: str, names: tuple[str, ...]) -> dict[str, Any]:
        out = folder / f"{platform}-{precision}.json"
        env = os.environ | {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "MESHTUNE_CACHE": str(folder / "cache")}
        env |= {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else GPU
        command = [sys.executable, run_cases.__file__, str(model), str(out), precision, *names]
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIME)
        assert process.returncode == 0, process.stderr[-3000:]
        return json.loads(out.read_text())

    def result(platform: str, precision: str, name: str, names: tuple[str, ...]) -> dict[str, Any]:
        if platform == jax.default_backend() == "cpu":
            return of_case(precision, name)
        for key in ((platform, precision), ("cpu", "float32")):  # side by side: the CPU's are wanted next
            if key not in running:
                running[key] = pool.submit(of_process, *key, names)
        return running[platform, precision].result()[name]

    running: dict[tuple[str, str], Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor() as pool:
        yield result


@pytest.fixture(scope="session")
def selected_cases(request) -> tuple[str, ...]:
    """The selected cases, so that one process runs them all."""
    params = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    return tuple(sorted({param["name"] for param in params if param.get("name") in CASES}))


@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("platform", "name", "precision"), on_both(RUNS, [], SLOW), indirect=["platform"])
def test_a_run_is_that_of_the_cpu(platform, name, precision, results, selected_cases):
    ours = results(platform, precision, name, selected_cases)
    theirs = results("cpu", "float32", name, selected_cases)
    for result in (theirs, ours):
        assert "failed" not in result, result["failed"]
    factor = LOOSER if name in LOOSE else 1
    losses, norms, logits = (factor * allowed for allowed in ALLOWED[precision])
    assert len(ours["losses"]) == UPDATES
    assert theirs["losses"][-1] != theirs["losses"][0]
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=losses)
    np.testing.assert_allclose(ours["grad_norms"], theirs["grad_norms"], rtol=norms)
    expected = np.array(theirs["logits"])
    np.testing.assert_allclose(np.array(ours["logits"]), expected, rtol=0, atol=logits * np.abs(expected).max())
    if precision == "float32" and name not in LOOSE:
        assert ours["texts"] == theirs["texts"]
