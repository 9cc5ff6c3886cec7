"""70B and 405B on 8 and 16 simulated devices: traced whole, and compiled with fewer layers to see what is exchanged."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import lowering_cases
import pytest
from lowering_cases import CASES

COMPILED = ["405B LoRA, fsdp=8 tp=2", "70B full, fsdp=8", "70B LoRA, fsdp=2 cp=4 tp=2"]
PARAMETERS = {"405B": 405.85e9, "70B": 70.55e9}


def ran(file, *arguments):
    program = pathlib.Path(lowering_cases.__file__)
    done = subprocess.run(
        [sys.executable, program, file, "16", *arguments], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr, "XLA moves whole arrays between layouts"
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("traced") / "found.json", *CASES)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("compiled") / "found.json", *COMPILED, "--compile")


@pytest.mark.parametrize("name", CASES)
def test_the_step_of_a_large_model_is_traced_and_each_device_holds_its_share(name, traced):
    case, found = CASES[name], traced[name]
    held = found["trainable"] if case.method == "full" else found["frozen"]
    ways = case.devices // case.mesh.get("dp", 1)
    share = PARAMETERS[case.model] * 2 / ways
    whole = 1.0
    if case.mesh.get("tp", 1) > 8:  # eight key heads stay whole on sixteen devices
        whole = 1.16
    assert share * 0.995 < held < share * 1.005 * whole
    if case.method == "full":
        assert 2 * held <= found["optimizer"] <= 2 * held * 1.001
    # Scanned layers: the program does not grow with depth. Unrolled it would be tens of megabytes.
    assert found["text"] < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_weights_are_gathered_layer_by_layer_and_neither_activations_nor_logits_ever_are(name, compiled):
    case, found = CASES[name], compiled[name]["collectives"]
    layers, vocab = 4, 128256
    rows = case.rows // case.mesh.get("fsdp", 1)
    gathered = [shape for shape in found["all-gather"] if len(shape) > 1]
    assert gathered
    for shape in gathered:
        stacked = len(shape) == 3 and shape[0] == layers and min(shape[1:]) > 8
        assert not stacked, f"all layers of a weight at once: {shape}"
        logits = vocab in shape and rows in shape[:1]
        assert not logits, f"logits: {shape}"
        activations = len(shape) == 3 and shape[0] == case.rows and shape[1] == case.length
        assert not activations, f"activations of all rows: {shape}"
    for shapes in found.values():
        assert all(case.length not in shape or shape[-1] < vocab for shape in shapes)
