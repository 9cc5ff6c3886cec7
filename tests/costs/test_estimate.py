"""Estimates against exact counts of arrays, and in the deviceless tier against XLA's compilers."""

from __future__ import annotations

import pytest
from llamas import llama

from meshtune.costs.collectives import Collective
from meshtune.costs.estimate import estimate, estimated_collectives, mesh_group
from meshtune.costs.hardware import find_target
from meshtune.mesh.config import MeshConfig
from meshtune.plan.compilers import compile_recipe
from meshtune.plan.shards import shardings_of
from meshtune.setup.search import predict_candidate, workload_of

FSDP, TP = "mesh.fsdp=8", "mesh.tp=8"
FULL, SELECTIVE, NONE = (f"compute.remat={name}" for name in ("full", "selective", "none"))
LONG, SHORT, MLP_CHUNK = "data.max_length=4096", "data.max_length=64", "compute.mlp_chunk=4096"
CHUNKED_AND_OFFLOADED = ["compute.mlp_chunk=2048", "compute.attention_chunk=2048", "compute.offload=[residual]"]
PPO = [
    "stage=ppo",
    "rollout={prompts: 4, samples: 1, max_tokens: 256}",
    "rewards=[{kind: equals}]",
    "train.batch_size=4",
]
# (model, target, overrides), which vary model size, method, format, mesh, rows, rematerialisation, offload, platform.
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
    ("8B", "H100", ["data.max_length=32768", "train.batch_size=1", "mesh.fsdp=1", FULL, "quantize=nf4", MLP_CHUNK]),
    (
        "8B",
        "RTX4090",
        ["data.max_length=65536", "train.batch_size=1", "mesh.fsdp=1", FULL, "quantize=nf4", *CHUNKED_AND_OFFLOADED],
    ),
    ("8B", "RTX4090", ["data.max_length=2048", "train.batch_size=1", "mesh.fsdp=1", FULL, "compute.offload=[weights]"]),
    ("8B", "8xH100", ["method=full", LONG, FSDP, FULL]),
    ("8B", "8xA100-80", ["method=full", LONG, FSDP, FULL, "compute.offload=[optimizer]"]),
    ("1B", "8xA100-80", ["method=full", "data.max_length=2048", "train.batch_size=16", FSDP, FULL]),
    ("70B", "2x8xA100-80", ["method=full", "data.max_length=2048", "train.batch_size=16", "mesh.fsdp=16", FULL]),
    ("70B", "8xH100", [LONG, FSDP, SELECTIVE]),
    ("70B", "4xH200", [LONG, "train.batch_size=4", "mesh.fsdp=4", FULL, "quantize=nf4"]),
    ("1B", "H100", [*PPO, "data.max_length=2048", "mesh.fsdp=1", FULL]),
    ("1B", "H100", [*PPO, "data.max_length=2048", "mesh.fsdp=1", NONE]),
    ("405B", "8xMI300X", [LONG, FSDP, FULL]),
    ("405B", "8xMI300X", [SHORT, "train.batch_size=16", TP, FULL]),
    ("405B", "8xMI300X", [SHORT, "train.batch_size=16", TP, SELECTIVE]),
]


def scored(tmp_path, model, target, *changes):
    recipe, machine = llama(tmp_path, model, *changes), find_target(target, env={})
    return recipe, machine, predict_candidate(recipe, machine, workload_of(recipe, machine.device.backend))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("70B", ["mesh.fsdp=4", "mesh.tp=2", FULL]),
        ("8B", ["method=full", FSDP, FULL]),
        ("8B", [FSDP, "method={kind: freeze, last_layers: 4}", FULL]),
    ],
)
def test_persistent_arrays_are_counted_exactly(tmp_path, model, changes):
    recipe, machine, plan = scored(tmp_path, model, "8xH100", *changes)
    exact = shardings_of(recipe, machine)
    breakdown = plan.estimate.breakdown
    assert breakdown["weights"] + breakdown["adapters"] == pytest.approx(exact.nbytes("frozen", "trained"), abs=16)
    assert breakdown["gradients"] == pytest.approx(exact.nbytes("gradient"), abs=16)
    assert breakdown["optimizer"] == pytest.approx(exact.nbytes("optimizer"), abs=16)


@pytest.mark.parametrize(("precision", "bytes_of_micro_batch"), [("bfloat16", 2), ("mixed", 4)])
def test_gradients_of_several_micro_batches_are_a_float32_sum_and_one_more_in_the_weights_dtype(
    tmp_path, precision, bytes_of_micro_batch
):
    changes = ["method=full", "mesh.fsdp=1", f"compute.precision={precision}", "train.batch_size=4", LONG, FULL]
    whole, parts = (
        scored(tmp_path, "1B", "H100", *changes, f"train.micro_batch={rows}")[2].estimate.breakdown for rows in (4, 1)
    )
    assert parts["gradients"] / whole["gradients"] == pytest.approx((4 + bytes_of_micro_batch) / 4)


def test_residual_and_optimizer_state_move_to_the_host(tmp_path):
    on_device = scored(tmp_path, "8B", "8xH100", FSDP, FULL, LONG)[2].estimate
    offloaded = scored(tmp_path, "8B", "8xH100", FSDP, FULL, LONG, "compute.offload=[residual, optimizer]")[2].estimate
    residual = 32 * 4096 * 4096 * 2
    assert offloaded.host == {"residual": residual, "optimizer": on_device.breakdown["optimizer"]}
    assert on_device.device_bytes - offloaded.device_bytes == residual + on_device.breakdown["optimizer"]


def test_a_group_is_the_device_indices_along_mesh_axes():
    sizes = MeshConfig(dp=2, fsdp=2, tp=2).sizes
    assert mesh_group(sizes, ("tp",)) == (0, 1)
    assert mesh_group(sizes, ("fsdp", "cp")) == (0, 2)
    assert mesh_group(sizes, ("dp", "fsdp", "cp")) == (0, 2, 4, 6)


def test_fsdp_gathers_each_layer_twice_and_tp_reduces_residuals(tmp_path):
    fsdp = estimated_collectives(scored(tmp_path, "8B", "8xH100", FSDP, SELECTIVE)[2].candidate)
    layer = 6.98e9 / 32 * 2
    gathers = [c.bytes for c in fsdp if c.kind == "all-gather" and c.count == 64]
    assert gathers == [pytest.approx(layer, rel=0.01)]
    tp = estimated_collectives(scored(tmp_path, "8B", "8xH100", TP, SELECTIVE)[2].candidate)
    (sums,) = (c for c in tp if c.kind == "all-reduce" and c.group_size == 8 and c.count > 1)
    assert sums.bytes == 8 * 4096 * 4096 * 2
    assert sums.count % 32 == 0


@pytest.mark.deviceless
@pytest.mark.parametrize(("model", "target", "changes"), MATRIX)
def test_within_a_tenth_of_the_compiler(tmp_path, model, target, changes):
    from deviceless import compiler_for

    recipe, machine, plan = scored(tmp_path, model, target, *changes)
    compiler_for(machine.device.platform)
    compiled = compile_recipe(recipe, machine)
    assert compiled.out_of_memory is None or compiled.needed_bytes
    assert estimate(plan.candidate).device_bytes == pytest.approx(compiled.device_bytes, rel=0.10)


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["8xH100", "8xMI300X"])
def test_layer_gradients_are_reduce_scattered_as_estimated(tmp_path, target):
    """An all-reduce would send twice the bytes of a reduce-scatter."""
    from deviceless import compiler_for

    changes = ["method=full", "data.max_length=2048", FSDP, FULL]
    recipe, machine, plan = scored(tmp_path, "1B", target, *changes)
    compiler_for(machine.device.platform)

    def bytes_sent(kind, collectives):
        return sum(c.bytes_sent * c.count for c in collectives if c.kind == kind)

    records = compile_recipe(recipe, machine).collectives or []
    compiled = [Collective(**{**record, "members": tuple(record["members"])}) for record in records]
    estimated = estimated_collectives(plan.candidate)
    layers = 16 * (2 * 2048 * (2048 + 512) + 3 * 2048 * 8192) * 2 * 7 / 8  # bytes in bf16, of Llama 3.2 1B
    head = 2 * 128256 * 2048 * 4 * 7 / 8
    assert layers <= bytes_sent("reduce-scatter", compiled) <= layers + head
    assert bytes_sent("reduce-scatter", estimated) == pytest.approx(layers, rel=0.01)
    assert bytes_sent("all-reduce", compiled) < 0.1 * layers
