"""The estimate against what is counted exactly, and in the deviceless tier against XLA's compilers."""

from __future__ import annotations

import pytest
from llamas import llama

from meshtune.mesh.axes import MeshConfig
from meshtune.plan.case import base_of
from meshtune.plan.collectives import Collective
from meshtune.plan.compilers import compiled
from meshtune.plan.estimate import estimate, exchanges, group
from meshtune.plan.hardware import find_target
from meshtune.plan.search import option
from meshtune.plan.shards import shardings_of

FSDP, TP = "mesh.fsdp=8", "mesh.tp=8"
FULL, SELECTIVE, NONE = (f"compute.remat={name}" for name in ("full", "selective", "none"))
LONG, SHORT, TILED = "data.max_length=4096", "data.max_length=64", "compute.mlp_chunk=4096"
AWAY = ["compute.mlp_chunk=2048", "compute.attention_chunk=2048", "compute.offload=[residual]"]
# model, target, changes. What differs: the model's size, method, format, mesh, rows, recomputation, offload, platform.
MATRIX = [
    ("8B", "H100", [LONG, "train.batch_size=1", "mesh.fsdp=1", SELECTIVE]),
    ("8B", "H100", [LONG, "train.batch_size=1", "mesh.fsdp=1", FULL]),
    ("1B", "H100", ["data.max_length=2048", "train.batch_size=4", "mesh.fsdp=1", NONE]),
    ("8B", "H100", ["data.max_length=16384", "train.batch_size=1", "mesh.fsdp=1", FULL, "quantize=nf4"]),
    ("8B", "8xH100", [LONG, FSDP, SELECTIVE]),
    ("8B", "8xH100", [LONG, FSDP, SELECTIVE, "compute.offload=[residual]"]),
    ("8B", "8xMI300X", [LONG, "train.batch_size=16", "mesh.fsdp=4", "mesh.tp=2", FULL]),
    ("8B", "8xH100", ["data.max_length=32768", "train.batch_size=1", "mesh.cp=4", "mesh.tp=2", SELECTIVE]),
    ("8B", "8xTPUv5p", [LONG, FSDP, SELECTIVE]),
    ("8B", "8xTPUv5p", [LONG, TP, FULL]),
    ("8B", "8xTPUv5e", [LONG, TP, FULL]),
    ("8B", "8xTPUv6e", [LONG, TP, FULL]),
    ("8B", "H100", ["data.max_length=32768", "train.batch_size=1", "mesh.fsdp=1", FULL, "quantize=nf4", TILED]),
    ("8B", "RTX4090", ["data.max_length=65536", "train.batch_size=1", "mesh.fsdp=1", FULL, "quantize=nf4", *AWAY]),
    ("8B", "RTX4090", ["data.max_length=2048", "train.batch_size=1", "mesh.fsdp=1", FULL, "compute.offload=[weights]"]),
    ("8B", "8xH100", ["method=full", LONG, FSDP, FULL]),
    ("8B", "8xA100-80", ["method=full", LONG, FSDP, FULL, "compute.offload=[optimizer]"]),
    ("1B", "8xA100-80", ["method=full", "data.max_length=2048", "train.batch_size=16", FSDP, FULL]),
    ("70B", "2x8xA100-80", ["method=full", "data.max_length=2048", "train.batch_size=16", "mesh.fsdp=16", FULL]),
    ("70B", "8xH100", [LONG, FSDP, SELECTIVE]),
    ("70B", "4xH200", [LONG, "train.batch_size=4", "mesh.fsdp=4", FULL, "quantize=nf4"]),
    ("405B", "8xMI300X", [LONG, FSDP, FULL]),
    ("405B", "8xMI300X", [SHORT, "train.batch_size=16", TP, FULL]),
    ("405B", "8xMI300X", [SHORT, "train.batch_size=16", TP, SELECTIVE]),
]


def optioned(tmp_path, model, target, *changes):
    recipe, machine = llama(tmp_path, model, *changes), find_target(target, env={})
    return recipe, machine, option(recipe, machine, base_of(recipe, machine.device.backend))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("70B", ["mesh.fsdp=4", "mesh.tp=2"]),
        ("8B", ["method=full", FSDP]),
        ("8B", [FSDP, "method={kind: freeze, last_layers: 4}"]),
    ],
)
def test_what_is_kept_is_counted_array_by_array(tmp_path, model, changes):
    recipe, machine, found = optioned(tmp_path, model, "8xH100", *changes)
    exact = shardings_of(recipe, machine)
    said = found.estimate.breakdown
    assert said["weights"] + said["adapters"] == pytest.approx(exact.nbytes("frozen", "trained"), abs=16)
    assert said["gradients"] == pytest.approx(exact.nbytes("gradient"), abs=16)
    assert said["optimizer"] == pytest.approx(exact.nbytes("optimizer"), abs=16)


def test_the_stream_and_the_optimizer_move_to_the_host(tmp_path):
    here = optioned(tmp_path, "8B", "8xH100", FSDP, FULL, LONG)[2].estimate
    there = optioned(tmp_path, "8B", "8xH100", FSDP, FULL, LONG, "compute.offload=[residual, optimizer]")[2].estimate
    stream = 32 * 4096 * 4096 * 2
    assert there.host == {"residual": stream, "optimizer": here.breakdown["optimizer"]}
    assert here.device_bytes - there.device_bytes == stream + here.breakdown["optimizer"]


def test_groups_are_places_along_the_mesh():
    sizes = MeshConfig(dp=2, fsdp=2, tp=2).sizes
    assert group(sizes, ("tp",)) == (0, 1)
    assert group(sizes, ("fsdp", "cp")) == (0, 2)
    assert group(sizes, ("dp", "fsdp", "cp")) == (0, 2, 4, 6)


def test_fsdp_gathers_each_layer_twice_and_tp_sums_streams(tmp_path):
    fsdp = exchanges(optioned(tmp_path, "8B", "8xH100", FSDP, SELECTIVE)[2].case)
    layer = 6.98e9 / 32 * 2
    gathers = [one for one in fsdp if one.kind == "all-gather" and one.count == 64]
    assert [one.bytes for one in gathers] == [pytest.approx(layer, rel=0.01)]
    tp = exchanges(optioned(tmp_path, "8B", "8xH100", TP, SELECTIVE)[2].case)
    (sums,) = (one for one in tp if one.kind == "all-reduce" and one.group_size == 8 and one.count > 1)
    assert sums.bytes == 8 * 4096 * 4096 * 2
    assert sums.count % 32 == 0


@pytest.mark.deviceless
@pytest.mark.parametrize(("model", "target", "changes"), MATRIX)
def test_within_a_tenth_of_the_compiler(tmp_path, model, target, changes):
    from deviceless import compiler_for

    recipe, machine, found = optioned(tmp_path, model, target, *changes)
    compiler_for(machine.device.platform)
    answer = compiled(recipe, machine)
    assert answer.out_of_memory is None or answer.needed_bytes
    assert estimate(found.case).device_bytes == pytest.approx(answer.device_bytes, rel=0.10)


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["8xH100", "8xMI300X"])
def test_gradients_of_layers_are_scattered_as_the_estimate_says(tmp_path, target):
    """A sum on every device would be an all-reduce of twice the bytes."""
    from deviceless import compiler_for

    changes = ["method=full", "data.max_length=2048", FSDP, FULL]
    recipe, machine, found = optioned(tmp_path, "1B", target, *changes)
    compiler_for(machine.device.platform)

    def moved(kind, some):
        return sum(one.moved * one.count for one in some if one.kind == kind)

    real = [
        Collective(**{**one, "members": tuple(one["members"])}) for one in compiled(recipe, machine).collectives or []
    ]
    guess = exchanges(found.case)
    layers = 16 * (2 * 2048 * (2048 + 512) + 3 * 2048 * 8192) * 2 * 7 / 8  # bytes in bf16, of Llama 3.2 1B
    head = 2 * 128256 * 2048 * 4 * 7 / 8
    assert layers <= moved("reduce-scatter", real) <= layers + head
    assert moved("reduce-scatter", guess) == pytest.approx(layers, rel=0.01)
    assert moved("all-reduce", real) < 0.1 * layers
