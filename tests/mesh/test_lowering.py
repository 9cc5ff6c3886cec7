"""70B and 405B on 8 and 16 simulated devices: traced in full, and compiled with fewer layers to check collectives."""

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


def run(file, *arguments):
    program = pathlib.Path(lowering_cases.__file__)
    done = subprocess.run(
        [sys.executable, program, file, "16", *arguments], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr, "XLA moves whole arrays between layouts"
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def compiled_results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("compiled") / "results.json", *COMPILED, "--compile")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == COMPILED[0] else pytest.mark.slow) for name in CASES]
)
def test_each_device_holds_its_share_of_a_large_model(name, tmp_path):
    case, results = CASES[name], run(tmp_path / "results.json", name)[name]
    weight_bytes = results["trainable"] if case.method == "full" else results["frozen"]
    shards = case.devices // case.mesh.get("dp", 1)
    share = PARAMETERS[case.model] * 2 / shards
    # Eight key heads are replicated over sixteen devices.
    replication = 1.16 if case.mesh.get("tp", 1) > 8 else 1.0
    assert share * 0.995 < weight_bytes < share * 1.005 * replication
    if case.method == "full":
        assert 2 * weight_bytes <= results["optimizer"] <= 2 * weight_bytes * 1.001
    # Layers are scanned: unrolled, the program would be tens of megabytes.
    assert results["text"] < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_weights_are_gathered_layer_by_layer_and_activations_and_logits_never(name, compiled_results):
    case, results = CASES[name], compiled_results[name]["collectives"]
    layers, vocab = 4, 128256
    rows = case.rows // case.mesh.get("fsdp", 1)
    gathered = [shape for shape in results["all-gather"] if len(shape) > 1]
    assert gathered
    for shape in gathered:
        stacked = len(shape) == 3 and shape[0] == layers and min(shape[1:]) > 8
        assert not stacked, f"all layers of a weight at once: {shape}"
        logits = vocab in shape and rows in shape[:1]
        assert not logits, f"logits: {shape}"
        activations = len(shape) == 3 and shape[0] == case.rows and shape[1] == case.length
        assert not activations, f"activations of all rows: {shape}"
    for shapes in results.values():
        assert all(case.length not in shape or shape[-1] < vocab for shape in shapes)
