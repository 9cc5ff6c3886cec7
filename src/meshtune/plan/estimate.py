"""What an update holds in memory and exchanges, estimated from shapes alone, for where no compiler can be asked.

What is kept (weights, adapters, optimizer) is counted exactly. What is made on the way follows the decoder: the stream
that enters every layer and what the rematerialisation policy keeps of each, one layer's widest arrays while it is
differentiated, its gathered weights, and the head with its chunk of logits. How many of each are there at the worst
moment depends on the compiler; the numbers here are fitted to XLA's answers (tests/plan/test_estimate.py compares
them: within 10% of the device's bytes).
"""

from __future__ import annotations

import dataclasses
import math

from meshtune.model.spec import ModelSpec
from meshtune.plan.case import Case
from meshtune.plan.collectives import Collective
from meshtune.plan.work import residual_bytes

ROLES = ("weights", "adapters", "gradients", "optimizer", "activations", "output")


@dataclasses.dataclass(frozen=True)
class Peak:
    """Arrays that are there at once at the worst moment of a layer's backward pass, or of the head's."""

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
# Of the arrays as wide as embed those that are there for whole rows: feed-forward tiled, attention tiled too.
WHOLE, WHOLE_TILED = 0.36, 0.2
HEAD = Peak(embed=4.0, ffn=0.0, heads=0.0, weights=2.0, logits=3.0)
# The head's matrix where it is trained: gathered and its gradient in float32 on a mesh, or on one device alone.
HEAD_TRAINED, HEAD_TRAINED_HERE = 4.8, 3.0
HEAD_TRAINED_AWAY = 3.4  # the same on a mesh where the optimizer's state waits on the host
# Of one layer's weights and state where these wait on the host: those on their way here and those on their way back.
STREAMED = 2.0
# On TPUs: of a layer's activations, the same where tp splits it (v5e's compiler takes a tenth less, v6e's a tenth
# more), and of a gathered head.
LEAN, LEAN_SPLIT, LEAN_HEAD = 0.63, 1.2, 1.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on one device by role, and of the host's memory for it by what is offloaded."""

    breakdown: dict[str, int]
    host: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.breakdown.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate(case: Case) -> Estimate:
    """The memory of one device while it updates."""
    held = kept_bytes(case)
    host: dict[str, float] = {}
    if "optimizer" in case.offload:
        host["optimizer"] = held.pop("optimizer")
        held["optimizer"] = 0.0
    if "weights" in case.offload:
        host["weights"] = case.held("stacked") + (case.held("full") if case.streamed else 0.0)
        held["weights"] -= host["weights"]
    if "residual" in case.offload:
        host["residual"] = residual_bytes(case)
    held["activations"] = activation_bytes(case)
    if case.streamed:
        held["activations"] += STREAMED * case.held("full", "optimizer") / case.base.spec.layers
    if case.accumulation > 1:
        held["gradients"] *= 2  # the sum so far, and those of the micro-batch under way
    return Estimate({role: int(held.get(role, 0)) for role in ROLES}, {role: int(size) for role, size in host.items()})


def kept_bytes(case: Case) -> dict[str, float]:
    """Weights (frozen or trained in full), adapters, gradients and optimizer state on one device."""
    return {
        "weights": case.held("frozen", "full"),
        "adapters": case.held("adapter"),
        "gradients": case.held("gradient"),
        "optimizer": case.held("optimizer"),
    }


def activation_bytes(case: Case) -> float:
    """All that is made on the way and let go again, gradients apart."""
    stream = 0.0 if "residual" in case.offload else residual_bytes(case)
    return stream + policy_bytes(case) + max(_layer(case), _head(case))


def policy_bytes(case: Case) -> float:
    """What `remat` keeps of every layer beside the stream that enters it."""
    spec, tp, number = case.base.spec, case.mesh.tp, case.narrow
    heads, kv = spec.heads * spec.head_dim / tp, spec.kv_heads * spec.head_dim / min(tp, spec.kv_heads)
    ffn = spec.ffn / tp
    match case.remat:
        case "full":
            return 0.0
        case "selective":
            # Rotated q and k, v, attention's result and log-sum-exp; the result of o; gate and up; adapters' narrow.
            a_token = number * (2 * heads + 2 * kv + spec.embed + 2 * ffn + narrow_width(case)) + 4 * spec.heads / tp
        case _:
            a_token = number * (NONE_EMBED * spec.embed + NONE_FFN * ffn + 4 * heads + 4 * kv)
    return case.tokens * spec.layers * a_token


NONE_EMBED, NONE_FFN = 8.0, 5.0


def narrow_width(case: Case) -> float:
    """Numbers a token and layer inside adapters."""
    ranks = [one.shape[-2] for one in case.base.kept if one.role == "adapter" and one.axes[-2:-1] == ("rank",)]
    stacks = max(1, len(list(case.base.spec.positions())))
    return sum(ranks) / stacks


def layer_weight_bytes(case: Case) -> float:
    """One layer's matrices as they are computed with, on one device."""
    arrays = case.base.parameters
    numbers = sum(leaf.size / leaf.shape[0] for leaf in arrays.values() if len(leaf.shape) > 2)
    return numbers / max(1, len(list(case.base.spec.positions()))) * case.narrow / case.mesh.tp


def _layer(case: Case) -> float:
    spec, tp, peak = case.base.spec, case.mesh.tp, LAYER[case.remat]
    rows = case.rows / (case.mesh.dp * case.mesh.fsdp)
    in_mlp, in_heads = (
        min(case.tokens, rows * chunk) if chunk else case.tokens
        for chunk in (case.mlp_chunk or case.attention_chunk, case.attention_chunk)
    )
    queries, keys = spec.heads * spec.head_dim / tp, 2 * spec.kv_heads * spec.head_dim / min(tp, spec.kv_heads)
    whole = WHOLE_TILED if case.attention_chunk else WHOLE
    made = (case.tokens * whole + in_mlp * (1 - whole)) * peak.embed * spec.embed
    made += in_mlp * peak.ffn * spec.ffn / tp + peak.heads * (in_heads * queries + case.tokens * keys)
    lean = 1.0 if case.target.device.platform != "tpu" else LEAN if tp == 1 else LEAN_SPLIT
    return lean * made * case.narrow + peak.weights * layer_weight_bytes(case)


def _head(case: Case) -> float:
    spec, mesh = case.base.spec, case.mesh
    rows = case.rows / (mesh.dp * mesh.fsdp)
    logits = 4 * rows * case.loss_chunk * spec.vocab / mesh.tp
    whole = spec.vocab * spec.embed * case.narrow / mesh.tp
    trained = any(one.role == "full" and one.path == head_path(spec) for one in case.base.kept)
    if mesh.fsdp * mesh.cp == 1:
        times = HEAD_TRAINED_HERE * trained
    elif trained:
        times = HEAD_TRAINED_AWAY if "optimizer" in case.offload else HEAD_TRAINED
    else:
        times = LEAN_HEAD if case.target.device.platform == "tpu" else HEAD.weights
    return HEAD.logits * logits + times * whole + HEAD.embed * case.tokens * spec.embed * case.narrow


def head_path(spec: ModelSpec) -> str:
    """The output head's matrix in the tree of parameters."""
    return spec.output


def exchanges(case: Case) -> list[Collective]:
    """The messages of an update, as the compilers arrange them: see plan.collectives for the real ones."""
    spec, mesh, number = case.base.spec, case.mesh, case.narrow
    found: list[Collective] = []

    def add(kind: str, size: float, axes: tuple[str, ...], count: float) -> None:
        members = group(mesh.sizes, axes)
        if len(members) > 1 and size > 0:
            found.append(Collective(kind, int(size), members, int(count * case.accumulation)))

    sharded, data = ("fsdp", "cp"), ("dp", "fsdp", "cp")
    ways = mesh.fsdp * mesh.cp
    # Frozen weights travel as they are kept, in codes where they are quantised; trained ones as they are computed with.
    add("all-gather", case.held("stacked") * ways / spec.layers, sharded, 2 * spec.layers)
    full = sum(math.prod(one.shape) for one in case.base.kept if one.role == "full" and one.path.startswith("layers/"))
    add("all-gather", full * number / mesh.tp / spec.layers, sharded, 2 * spec.layers)
    head = spec.vocab * spec.embed * number / mesh.tp
    add("all-gather", head, sharded, 1)
    # Gradients of layers are scattered where each device keeps another part of all of them; XLA for TPUs sums them.
    scattered = full * number / mesh.tp if mesh.dp == 1 and case.target.device.platform != "tpu" else 0.0
    add("reduce-scatter", scattered / spec.layers, sharded, spec.layers)
    add("all-reduce", case.summed * ways * number / 4 - scattered, data, 1)
    stream = case.tokens * spec.embed * number
    add("all-reduce", stream, ("tp",), spec.layers * (8 if case.remat == "full" else 6))
    ring = 2 * case.tokens * spec.kv_heads * spec.head_dim / min(mesh.tp, spec.kv_heads)
    again = 1 if case.remat == "full" else 0
    add("collective-permute", ring * number, ("cp",), spec.layers * (mesh.cp - 1) * (1 + again))
    add("collective-permute", ring * (number + 4), ("cp",), spec.layers * mesh.cp)
    return found


def group(sizes: dict[str, int], axes: tuple[str, ...]) -> tuple[int, ...]:
    """The places of the devices that form the first group along some axes; places count in the mesh's own order."""
    members, step = [0], 1
    for axis in reversed(list(sizes)):
        if axis in axes:
            members = [place + step * n for n in range(sizes[axis]) for place in members]
        step *= sizes[axis]
    return tuple(sorted(members))
