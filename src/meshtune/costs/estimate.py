"""Estimates a step's memory and collectives from shapes, without a compiler.

Persistent arrays (weights, adapters, optimizer state) are counted exactly. Activations follow the structure of the
decoder: the residual saved at every layer's input and the arrays that the rematerialisation policy saves, the widest
arrays of one layer while it is differentiated, its gathered weights, and the head with one chunk of logits. How many
of each exist at the peak depends on the compiler; the constants are fitted to XLA's figures, and a test checks that
estimates are within 10% of them (tests/costs/test_estimate.py).
"""

from __future__ import annotations

import dataclasses

from meshtune.costs.collectives import Collective
from meshtune.costs.roofline import residual_bytes
from meshtune.costs.workload import Candidate, LayerCost, bytes_per_element
from meshtune.mesh.layout import SHARDS
from meshtune.model.block import HEADROOM
from meshtune.objectives.answers import CRITIC
from meshtune.objectives.config import ONLINE_STAGES

ROLES = ("weights", "adapters", "gradients", "optimizer", "activations", "output")


@dataclasses.dataclass(frozen=True)
class Peak:
    """How many arrays of each width exist at once at the peak of a layer's backward pass, or of the head's."""

    embed: float  # [tokens, embed]
    ffn: float  # [tokens, the widest array of the feed-forward network]
    mixer: float  # [tokens, the widest array of the mixer and what it needs of whole rows (keys and values)]
    weights: float  # a layer's weights or the head's, gathered or sliced out of their stack
    logits: float  # [chunk, vocab] in float32


LAYER = {
    "none": Peak(embed=11.0, ffn=2.5, mixer=3.0, weights=1.0, logits=0.0),
    "selective": Peak(embed=11.0, ffn=1.0, mixer=1.0, weights=1.0, logits=0.0),
    "full": Peak(embed=11.0, ffn=2.5, mixer=3.0, weights=1.0, logits=0.0),
}
# The share of the [tokens, embed] arrays that still exist for whole rows where mlp_chunk, or attention_chunk, is set.
WHOLE_ROWS_MLP_CHUNK, WHOLE_ROWS_ATTENTION_CHUNK = 0.36, 0.2
HEAD = Peak(embed=4.0, ffn=0.0, mixer=0.0, weights=2.0, logits=3.0)
# Copies of a trained head's matrix, its float32 gradient included: gathered on a mesh, on a single device, and on a
# mesh with the optimizer's state on the host.
HEAD_TRAINED, HEAD_TRAINED_ONE_DEVICE, HEAD_TRAINED_OFFLOADED = 4.8, 3.0, 3.4
# Copies of one layer's weights and optimizer state where these live on the host: one arriving and one leaving.
STREAMED = 2.0
# On TPUs: the share of a layer's activations, the same where tp splits it (v5e's compiler takes a tenth less, v6e's a
# tenth more), and copies of a gathered head.
TPU_LAYER, TPU_LAYER_TP, TPU_HEAD = 0.63, 1.2, 1.0
# Saved by `remat: none`: arrays as wide as embed, as the feed-forward's widest, as the mixer's widest, and as keys and
# values together.
NONE_EMBED, NONE_FFN, NONE_MIXER, NONE_WHOLE_ROWS = 8.0, 5.0, 4.0, 2.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on one device by role, and bytes of host memory for that device by offloaded part."""

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
    if "tables" in candidate.offload:
        host["tables"] = candidate.local_bytes("tables")
        device["weights"] -= host["tables"]
    if "residual" in candidate.offload:
        host["residual"] = residual_bytes(candidate)
    device["activations"] = activation_bytes(candidate)
    if candidate.streams_trained_weights:
        device["activations"] += STREAMED * candidate.local_bytes("full", "optimizer") / candidate.workload.spec.layers
    if candidate.accumulation > 1:
        # The accumulated sum in float32, and those of the current micro-batch in the dtype of what is trained.
        device["gradients"] *= 1 + bytes_per_element(candidate.workload.precision.trainable) / 4
    return Estimate(
        {role: int(device.get(role, 0)) for role in ROLES}, {role: int(size) for role, size in host.items()}
    )


def persistent_bytes(candidate: Candidate) -> dict[str, float]:
    """Weights (frozen or trained in full), adapters, gradients and optimizer state on one device."""
    return {
        "weights": candidate.local_bytes("frozen", "full") + reference_bytes(candidate),
        "adapters": candidate.local_bytes("adapter"),
        "gradients": candidate.local_bytes("gradient"),
        "optimizer": candidate.local_bytes("optimizer"),
    }


def reference_bytes(candidate: Candidate) -> float:
    """Bytes on one device of the reference model that an online stage keeps: a copy of what is trained, where the base
    with its adapters off is not what the run starts from."""
    workload = candidate.workload
    stage = workload.recipe.stage
    weight = getattr(stage, "kl_coef", 0.0) if stage.kind == "ppo" else getattr(stage, "beta", 0.0)
    if stage.kind not in ONLINE_STAGES or not weight or workload.method.reference_obstacle is None:
        return 0.0
    trained = [array for array in workload.persistent if array.role in ("full", "adapter")]
    return sum(array.local_bytes(candidate.layout) for array in trained if not array.path.startswith(f"{CRITIC}/"))


def activation_bytes(candidate: Candidate) -> float:
    """The peak of all temporary arrays on one device, gradients excluded."""
    residual = 0.0 if "residual" in candidate.offload else residual_bytes(candidate)
    peak = max(_layer_peak(candidate), _head_peak(candidate), _tower_peak(candidate))
    return residual + policy_bytes(candidate) + tower_bytes(candidate) + peak


def policy_bytes(candidate: Candidate) -> float:
    """Returns the bytes that `remat` saves of every layer, a critic's too, without the residual at its input."""
    spec, tp, itemsize = candidate.workload.spec, candidate.mesh.tp, candidate.activation_itemsize
    per_token = 0.0
    for layer in candidate.workload.layers:
        match candidate.remat:
            case "full":
                saved = 0.0
            case "selective":
                # The activations that the blocks mark as kept, the mixer's output, and A x of adapters.
                saved = sum(block.saved_bytes(tp, itemsize, candidate.routed_rows(block)) for block in layer.blocks)
                saved += itemsize * (spec.embed + adapter_width(candidate))
            case _:
                elements = NONE_EMBED * spec.residual
                elements += NONE_FFN * layer.ffn.widest(tp, candidate.routed_rows(layer.ffn)) if layer.ffn else 0.0
                if layer.mixer:
                    elements += NONE_MIXER * layer.mixer.widest(tp) + NONE_WHOLE_ROWS * layer.mixer.whole_rows(tp)
                saved = itemsize * elements
        per_token += layer.repeats * saved
    return candidate.workload.models * candidate.tokens * per_token


def tower_bytes(candidate: Candidate) -> float:
    """The bytes that a trained tower saves for its backward pass: the residual at the input of each layer."""
    tower = candidate.workload.tower
    if tower is None or not tower.trained:
        return 0.0
    return candidate.patches * tower.width * tower.depth * candidate.activation_itemsize


def _tower_peak(candidate: Candidate) -> float:
    """The peak of the tower's layers: forward alone where it is frozen."""
    tower, peak = candidate.workload.tower, LAYER["full"]
    if tower is None:
        return 0.0
    widest = tower.widest(candidate.mesh.tp)
    elements = peak.embed * tower.width + peak.mixer * widest if tower.trained else 4 * tower.width + 2 * widest
    return candidate.patches * elements * candidate.activation_itemsize


def adapter_width(candidate: Candidate) -> float:
    """Elements per token and layer of the low-rank activations inside adapters."""
    workload = candidate.workload
    adapters = (a for a in workload.persistent if a.role == "adapter" and not a.path.startswith(f"{CRITIC}/"))
    ranks = [a.shape[-2] for a in adapters if a.axes[-2:-1] == ("rank",)]
    return sum(ranks) / max(1, len(workload.layers))


def _layer_peak(candidate: Candidate) -> float:
    """The peak of the layer that needs most."""
    return max((_peak_of(layer, candidate) for layer in candidate.workload.layers), default=0.0)


def _peak_of(layer: LayerCost, candidate: Candidate) -> float:
    spec, mesh, peak = candidate.workload.spec, candidate.mesh, LAYER[candidate.remat]
    mlp_tokens, query_tokens = (
        min(candidate.tokens, candidate.local_rows * chunk) if chunk else candidate.tokens
        for chunk in (candidate.mlp_chunk or candidate.attention_chunk, candidate.attention_chunk)
    )
    whole_rows = WHOLE_ROWS_ATTENTION_CHUNK if candidate.attention_chunk else WHOLE_ROWS_MLP_CHUNK
    elements = (candidate.tokens * whole_rows + mlp_tokens * (1 - whole_rows)) * peak.embed * spec.residual
    if layer.ffn:
        elements += mlp_tokens * peak.ffn * layer.ffn.widest(mesh.tp, candidate.routed_rows(layer.ffn))
    if layer.mixer:
        past = candidate.tokens * layer.mixer.whole_rows(mesh.tp)
        elements += peak.mixer * (query_tokens * layer.mixer.widest(mesh.tp) + past)
    scale = 1.0
    if candidate.target.device.platform == "tpu":
        scale = TPU_LAYER if mesh.tp == 1 else TPU_LAYER_TP
    weights = sum(block.local_weights(mesh.tp, mesh.ep) for block in layer.blocks)
    return (scale * elements + peak.weights * weights) * candidate.activation_itemsize


def _head_peak(candidate: Candidate) -> float:
    spec, mesh = candidate.workload.spec, candidate.mesh
    logits = 4 * candidate.local_rows * candidate.loss_chunk * spec.vocab / mesh.tp
    matrix = spec.vocab * spec.embed * candidate.activation_itemsize / mesh.tp
    trained = any(a.role == "full" and a.path == spec.output for a in candidate.workload.persistent)
    if candidate.weight_shards == 1:
        copies = HEAD_TRAINED_ONE_DEVICE * trained
    elif trained:
        copies = HEAD_TRAINED_OFFLOADED if "optimizer" in candidate.offload else HEAD_TRAINED
    else:
        copies = TPU_HEAD if candidate.target.device.platform == "tpu" else HEAD.weights
    if "tables" in candidate.offload and not trained:  # fetched for the loss
        copies += 1 / candidate.weight_shards
    hidden = candidate.tokens * spec.embed * candidate.activation_itemsize
    return HEAD.logits * logits + copies * matrix + HEAD.embed * hidden


def estimated_collectives(candidate: Candidate) -> list[Collective]:
    """The collectives of an update as compilers typically arrange them; costs.collectives reads the compiled ones."""
    spec, mesh, itemsize = candidate.workload.spec, candidate.mesh, candidate.activation_itemsize
    collectives: list[Collective] = []

    def add(kind: str, size: float, axes: tuple[str, ...], count: float) -> None:
        members = mesh_group(mesh.sizes, axes)
        if len(members) > 1 and size > 0:
            collectives.append(Collective(kind, int(size), members, int(count * candidate.accumulation)))

    sharded, data, shards = SHARDS, ("dp", *SHARDS), candidate.weight_shards
    # Frozen weights are gathered as they are stored (quantised codes if so), trained ones in the compute dtype.
    models = candidate.workload.models
    add("all-gather", candidate.local_bytes("stacked") * shards / spec.layers, sharded, 2 * models * spec.layers)
    trained = sum(array.size for array in candidate.workload.persistent if array.role == "full" and array.is_stacked)
    add("all-gather", trained * itemsize / mesh.tp / spec.layers, sharded, 2 * spec.layers)
    head = spec.vocab * spec.embed * itemsize / mesh.tp
    add("all-gather", head, sharded, 1)
    # Layer gradients are reduce-scattered where every device holds a different shard; XLA for TPUs all-reduces them.
    scattered = trained * itemsize / mesh.tp if mesh.dp == 1 and candidate.target.device.platform != "tpu" else 0.0
    add("reduce-scatter", scattered / spec.layers, sharded, spec.layers)
    add("all-reduce", candidate.update_gradient_bytes * shards * itemsize / 4 - scattered, data, 1)
    passes = models * (2 if candidate.remat == "full" else 1)  # forward passes
    residual = candidate.tokens * spec.embed * itemsize
    blocks = sum(layer.repeats * len(layer.blocks) for layer in candidate.workload.layers)
    add("all-reduce", residual, ("tp",), blocks * (2 * models + passes))
    for layer in candidate.workload.layers:
        for block in layer.blocks:
            ring = candidate.tokens * block.whole_rows(mesh.tp)
            add("collective-permute", ring * itemsize, ("cp",), layer.repeats * (mesh.cp - 1) * passes)
            add("collective-permute", ring * (itemsize + 4), ("cp",), layer.repeats * mesh.cp * models)
            # To the experts and back, in every forward pass and in the backward pass.
            match block.exchange(mesh.ep, candidate.workload.recipe.compute.expert_exchange):
                case "gather":
                    for kind in ("all-gather", "reduce-scatter"):
                        add(kind, mesh.ep * residual, ("ep",), layer.repeats * (passes + models))
                case "all_to_all":
                    slots = HEADROOM * candidate.tokens * block.cost.dispatched
                    add("all-to-all", slots * itemsize, ("ep",), layer.repeats * 2 * (passes + models))
    return collectives


def mesh_group(sizes: dict[str, int], axes: tuple[str, ...]) -> tuple[int, ...]:
    """The device indices, in mesh order, of the first group along some axes of a mesh with these axis sizes."""
    members, step = [0], 1
    for axis in reversed(list(sizes)):
        if axis in axes:
            members = [member + step * n for n in range(sizes[axis]) for member in members]
        step *= sizes[axis]
    return tuple(sorted(members))
