"""Estimates a step's memory and collectives from shapes alone, where no compiler is available.

Persistent arrays (weights, adapters, optimizer state) are counted exactly. Activations follow the structure of the
decoder: the residual saved at every layer's input and what the rematerialisation policy saves beside it, the widest
arrays of one layer while it is differentiated, its gathered weights, and the head with one chunk of logits. How many
of each exist at the peak depends on the compiler; the constants are fitted to XLA's figures, and a test checks that
estimates are within 10% of them (tests/plan/test_estimate.py).
"""

from __future__ import annotations

import dataclasses
import math

from meshtune.model.spec import ModelSpec
from meshtune.plan.candidate import Candidate
from meshtune.plan.collectives import Collective
from meshtune.plan.work import mean_heads, mean_width, residual_bytes

ROLES = ("weights", "adapters", "gradients", "optimizer", "activations", "output")


@dataclasses.dataclass(frozen=True)
class Peak:
    """How many arrays of each width exist at once at the peak of a layer's backward pass, or of the head's."""

    embed: float  # [tokens, embed]
    ffn: float  # [tokens, ffn]
    heads: float  # [tokens, heads + 2 kv_heads]
    weights: float  # a layer's weights or the head's, gathered or sliced out of their stack
    logits: float  # [chunk, vocab] in float32


LAYER = {
    "none": Peak(embed=11.0, ffn=2.5, heads=3.0, weights=1.0, logits=0.0),
    "selective": Peak(embed=11.0, ffn=1.0, heads=1.0, weights=1.0, logits=0.0),
    "full": Peak(embed=11.0, ffn=2.5, heads=3.0, weights=1.0, logits=0.0),
}
# The share of the [tokens, embed] arrays that still exist for whole rows where mlp_chunk, or attention_chunk, is set.
WHOLE_ROWS_MLP_CHUNK, WHOLE_ROWS_ATTENTION_CHUNK = 0.36, 0.2
HEAD = Peak(embed=4.0, ffn=0.0, heads=0.0, weights=2.0, logits=3.0)
# Copies of a trained head's matrix, its float32 gradient included: gathered on a mesh, on a single device, and on a
# mesh with the optimizer's state on the host.
HEAD_TRAINED, HEAD_TRAINED_ONE_DEVICE, HEAD_TRAINED_OFFLOADED = 4.8, 3.0, 3.4
# Copies of one layer's weights and optimizer state where these live on the host: one arriving and one leaving.
STREAMED = 2.0
# On TPUs: the share of a layer's activations, the same where tp splits it (v5e's compiler takes a tenth less, v6e's a
# tenth more), and copies of a gathered head.
TPU_LAYER, TPU_LAYER_TP, TPU_HEAD = 0.63, 1.2, 1.0
# Saved by `remat: none` beside q, k, v and attention's output: arrays as wide as embed and as ffn.
NONE_EMBED, NONE_FFN = 8.0, 5.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on one device by role, and bytes of host memory for that device by what is offloaded."""

    breakdown: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate(candidate: Candidate) -> Estimate:
    """The peak memory of one device during an update."""
    device = persistent_bytes(candidate)
    host: dict[str, float] = {}
    if "optimizer" in candidate.offload:
        host["optimizer"] = device.pop("optimizer")
        device["optimizer"] = 0.0
    if "weights" in candidate.offload:
        trained = candidate.local_bytes("full") if candidate.streams_trained_weights else 0.0
        host["weights"] = candidate.local_bytes("stacked") + trained
        device["weights"] -= host["weights"]
    if "residual" in candidate.offload:
        host["residual"] = residual_bytes(candidate)
    device["activations"] = activation_bytes(candidate)
    if candidate.streams_trained_weights:
        device["activations"] += STREAMED * candidate.local_bytes("full", "optimizer") / candidate.workload.spec.layers
    if candidate.accumulation > 1:
        device["gradients"] *= 2  # the accumulated sum, and those of the current micro-batch
    return Estimate(
        {role: int(device.get(role, 0)) for role in ROLES}, {role: int(size) for role, size in host.items()}
    )


def persistent_bytes(candidate: Candidate) -> dict[str, float]:
    """Weights (frozen or trained in full), adapters, gradients and optimizer state on one device."""
    return {
        "weights": candidate.local_bytes("frozen", "full"),
        "adapters": candidate.local_bytes("adapter"),
        "gradients": candidate.local_bytes("gradient"),
        "optimizer": candidate.local_bytes("optimizer"),
    }


def activation_bytes(candidate: Candidate) -> float:
    """The peak of all temporary arrays on one device, gradients excluded."""
    residual = 0.0 if "residual" in candidate.offload else residual_bytes(candidate)
    return residual + policy_bytes(candidate) + max(_layer_peak(candidate), _head_peak(candidate))


def policy_bytes(candidate: Candidate) -> float:
    """What `remat` saves of every layer beside the residual at its input."""
    spec, tp, itemsize = candidate.workload.spec, candidate.mesh.tp, candidate.activation_itemsize
    heads, kv, ffn = (mean_width(spec, axis, tp) for axis in ("heads", "kv_heads", "ffn"))
    match candidate.remat:
        case "full":
            return 0.0
        case "selective":
            # Rotated q and k, v, attention's output and log-sum-exp; the output of o; gate and up; A x of adapters.
            elements = 2 * heads + 2 * kv + spec.embed + 2 * ffn + adapter_width(candidate)
            per_token = itemsize * elements + 4 * mean_heads(spec) / tp
        case _:
            per_token = itemsize * (NONE_EMBED * spec.embed + NONE_FFN * ffn + 4 * heads + 4 * kv)
    return candidate.tokens * spec.layers * per_token


def adapter_width(candidate: Candidate) -> float:
    """Elements per token and layer of the low-rank activations inside adapters."""
    workload = candidate.workload
    ranks = [a.shape[-2] for a in workload.persistent if a.role == "adapter" and a.axes[-2:-1] == ("rank",)]
    stacks = max(1, len(list(workload.spec.positions())))
    return sum(ranks) / stacks


def layer_weight_bytes(candidate: Candidate) -> float:
    """One layer's matrices in the compute dtype, on one device."""
    workload = candidate.workload
    elements = sum(leaf.size / leaf.shape[0] for leaf in workload.parameters.values() if len(leaf.shape) > 2)
    layers = max(1, len(list(workload.spec.positions())))
    return elements / layers * candidate.activation_itemsize / candidate.mesh.tp


def _layer_peak(candidate: Candidate) -> float:
    spec, tp, peak = candidate.workload.spec, candidate.mesh.tp, LAYER[candidate.remat]
    rows = candidate.rows / (candidate.mesh.dp * candidate.mesh.fsdp)
    mlp_tokens, query_tokens = (
        min(candidate.tokens, rows * chunk) if chunk else candidate.tokens
        for chunk in (candidate.mlp_chunk or candidate.attention_chunk, candidate.attention_chunk)
    )
    queries, keys = mean_width(spec, "heads", tp), 2 * mean_width(spec, "kv_heads", tp)
    whole_rows = WHOLE_ROWS_ATTENTION_CHUNK if candidate.attention_chunk else WHOLE_ROWS_MLP_CHUNK
    elements = (candidate.tokens * whole_rows + mlp_tokens * (1 - whole_rows)) * peak.embed * spec.embed
    elements += mlp_tokens * peak.ffn * mean_width(spec, "ffn", tp)
    elements += peak.heads * (query_tokens * queries + candidate.tokens * keys)
    scale = 1.0 if candidate.target.device.platform != "tpu" else TPU_LAYER if tp == 1 else TPU_LAYER_TP
    return scale * elements * candidate.activation_itemsize + peak.weights * layer_weight_bytes(candidate)


def _head_peak(candidate: Candidate) -> float:
    spec, mesh = candidate.workload.spec, candidate.mesh
    rows = candidate.rows / (mesh.dp * mesh.fsdp)
    logits = 4 * rows * candidate.loss_chunk * spec.vocab / mesh.tp
    matrix = spec.vocab * spec.embed * candidate.activation_itemsize / mesh.tp
    trained = any(a.role == "full" and a.path == head_path(spec) for a in candidate.workload.persistent)
    if mesh.fsdp * mesh.cp == 1:
        copies = HEAD_TRAINED_ONE_DEVICE * trained
    elif trained:
        copies = HEAD_TRAINED_OFFLOADED if "optimizer" in candidate.offload else HEAD_TRAINED
    else:
        copies = TPU_HEAD if candidate.target.device.platform == "tpu" else HEAD.weights
    hidden = candidate.tokens * spec.embed * candidate.activation_itemsize
    return HEAD.logits * logits + copies * matrix + HEAD.embed * hidden


def head_path(spec: ModelSpec) -> str:
    """The path of the output head's matrix in the tree of parameters."""
    return spec.output


def estimated_collectives(candidate: Candidate) -> list[Collective]:
    """The collectives of an update as compilers typically arrange them; plan.collectives reads the compiled ones."""
    spec, mesh, itemsize = candidate.workload.spec, candidate.mesh, candidate.activation_itemsize
    collectives: list[Collective] = []

    def add(kind: str, size: float, axes: tuple[str, ...], count: float) -> None:
        members = mesh_group(mesh.sizes, axes)
        if len(members) > 1 and size > 0:
            collectives.append(Collective(kind, int(size), members, int(count * candidate.accumulation)))

    sharded, data = ("fsdp", "cp"), ("dp", "fsdp", "cp")
    shards = mesh.fsdp * mesh.cp
    # Frozen weights are gathered as they are stored (quantised codes if so), trained ones in the compute dtype.
    add("all-gather", candidate.local_bytes("stacked") * shards / spec.layers, sharded, 2 * spec.layers)
    trained = sum(
        math.prod(array.shape)
        for array in candidate.workload.persistent
        if array.role == "full" and array.path.startswith("layers/")
    )
    add("all-gather", trained * itemsize / mesh.tp / spec.layers, sharded, 2 * spec.layers)
    head = spec.vocab * spec.embed * itemsize / mesh.tp
    add("all-gather", head, sharded, 1)
    # Layer gradients are reduce-scattered where every device holds a different shard; XLA for TPUs all-reduces them.
    scattered = trained * itemsize / mesh.tp if mesh.dp == 1 and candidate.target.device.platform != "tpu" else 0.0
    add("reduce-scatter", scattered / spec.layers, sharded, spec.layers)
    add("all-reduce", candidate.update_gradient_bytes * shards * itemsize / 4 - scattered, data, 1)
    residual = candidate.tokens * spec.embed * itemsize
    add("all-reduce", residual, ("tp",), spec.layers * (8 if candidate.remat == "full" else 6))
    ring = 2 * candidate.tokens * mean_width(spec, "kv_heads", mesh.tp)
    passes = 2 if candidate.remat == "full" else 1
    add("collective-permute", ring * itemsize, ("cp",), spec.layers * (mesh.cp - 1) * passes)
    add("collective-permute", ring * (itemsize + 4), ("cp",), spec.layers * mesh.cp)
    return collectives


def mesh_group(sizes: dict[str, int], axes: tuple[str, ...]) -> tuple[int, ...]:
    """The device indices, in mesh order, of the first group along some axes of a mesh with these axis sizes."""
    members, step = [0], 1
    for axis in reversed(list(sizes)):
        if axis in axes:
            members = [member + step * n for n in range(sizes[axis]) for member in members]
        step *= sizes[axis]
    return tuple(sorted(members))
