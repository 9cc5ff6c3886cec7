"""Arrays that wait in the host's memory are trained as if they did not, and really wait there."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import offload_cases
import pytest
from offload_cases import CASES, UPDATES

# Bringing a number from the host changes no bit. What differs is how XLA fuses an update that goes layer by layer, and
# the order in which chunks are added up: 1e-7 of a number an update, where an update moves a number by 1e-3.
CLOSE = 5e-6
CODES = 1e-4  # a moment near the middle of two codes of 8 bits may be kept as either
QUICK = ["lora, all"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run(QUICK, tmp_path_factory.mktemp("quick") / "found.json")


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    return run([name for name in CASES if name not in QUICK], tmp_path_factory.mktemp("others") / "found.json")


def run(names, file):
    program = pathlib.Path(offload_cases.__file__)
    ran = subprocess.run([sys.executable, program, file, *names], capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(file.read_text())


def check_near(name, results):
    on_device, on_host = results["without"], results["with"]
    assert len(on_host["loss"]) == UPDATES
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(on_host[key], on_device[key], rtol=CLOSE, err_msg=key)
    # AdamW divides by the root of its second moment: of a gradient near zero the last bits are seen in the weight.
    atol = CODES if CASES[name].optimizer == "adamw8bit" else 4 * CLOSE
    for ours, theirs in zip(on_host["leaves"], on_device["leaves"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    offload = CASES[name].compute.get("offload", ())
    assert on_host["kinds"]["optimizer"] == (["pinned_host"] if "optimizer" in offload else ["device"])
    if on_host["kinds"]["frozen"]:
        assert ("pinned_host" in on_host["kinds"]["frozen"]) == (not {"weights", "tables"}.isdisjoint(offload))
    waits = CASES[name].fused and "weights" in offload
    assert on_host["kinds"]["trainable"] == (["pinned_host"] if waits else ["device"])


@pytest.mark.parametrize("name", QUICK)
def test_offloaded_state_is_updated_as_any(name, quick):
    check_near(name, quick[name])


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_offload_goes_with_every_method_and_mesh(name, slow_results):
    check_near(name, slow_results[name])
