"""Counts the work of an update on one device: floating-point operations, device-memory traffic, host traffic.

Operations follow the convention of published figures: multiplying a token by a weight costs 2 operations per weight
forward, 2 for the gradient of the input wherever something below it is trained, and 2 for the gradient of the weight if
it is trained (in all 4N per token for LoRA and 6N for full tuning); attention is counted at half its square. What the
backward pass recomputes is counted separately.
"""

from __future__ import annotations

import dataclasses
import math

from meshtune.adapters.config import LoraConfig
from meshtune.model.spec import ModelSpec
from meshtune.plan.candidate import Candidate


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one update on one device. `flops` are the model's own; `recompute_flops` come on top.

    Bytes through device memory: `product_bytes` are operands and results of matrix products (weights as often as they
    are read), `elementwise_bytes` everything between the products, `update_bytes` gradients and optimizer. `host_bytes`
    are transferred to and from host memory; of these `host_exposed_bytes` do not overlap with computation. `tokens` are
    those of all devices.
    """

    flops: float
    recompute_flops: float
    product_bytes: float
    elementwise_bytes: float
    update_bytes: float
    host_bytes: float
    tokens: float
    host_exposed_bytes: float = 0.0

    @property
    def memory_bytes(self) -> float:
        return self.product_bytes + self.elementwise_bytes + self.update_bytes


@dataclasses.dataclass(frozen=True)
class MatrixSizes:
    """Elements of the matrices of all layers, of the output head, of those trained in full, and of adapters.

    `backward_fraction` is the share of the layers' elements through which a gradient passes.
    """

    layers: int
    head: int
    trained: int
    adapters: int
    backward_fraction: float


def matrix_sizes(candidate: Candidate) -> MatrixSizes:
    """Counts the elements of the model's matrices by what is done with them."""
    workload = candidate.workload
    spec = workload.spec
    matrices = {path: leaf for path, leaf in workload.parameters.items() if is_matrix(path)}
    in_layers = {path: leaf.size for path, leaf in matrices.items() if path.startswith("layers/")}
    head = matrices[spec.output].size
    trained_paths = {array.path for array in workload.persistent if array.role == "full"}
    trained = sum(size for path, size in in_layers.items() if path in trained_paths)
    trained += head if spec.output in trained_paths else 0
    adapters = sum(math.prod(array.shape) for array in workload.persistent if array.role == "adapter")
    fraction = _backward_fraction(candidate, in_layers, trained_paths)
    return MatrixSizes(sum(in_layers.values()), head, trained, adapters, fraction)


def work_of(candidate: Candidate) -> Work:
    """The work of one update, split evenly over the devices."""
    spec, sizes = candidate.workload.spec, matrix_sizes(candidate)
    tokens = candidate.rows * candidate.length * candidate.accumulation
    device_tokens = tokens / candidate.mesh.devices
    scores = attention_flops(spec, candidate.length)
    forward = 2 * (sizes.layers + sizes.head) + scores
    input_gradients = 2 * (sizes.layers * sizes.backward_fraction + sizes.head) + 2 * scores * sizes.backward_fraction
    flops = device_tokens * (forward + input_gradients + 2 * sizes.trained + 6 * sizes.adapters)
    recompute = device_tokens * scores / 2  # attention's scores are recomputed in its backward pass
    if candidate.remat == "full":
        recompute += device_tokens * (2 * sizes.layers + scores) * sizes.backward_fraction
    products, elementwise = _activation_traffic(candidate)
    layers, head = (n * candidate.activation_itemsize / candidate.mesh.tp for n in (sizes.layers, sizes.head))
    weight_reads = 1 + sizes.backward_fraction * (2 if candidate.remat == "full" else 1)
    gather_traffic = 2 if candidate.mesh.fsdp * candidate.mesh.cp > 1 else 0  # gathered weights are written and read
    per_micro_batch = layers * (weight_reads + gather_traffic) + 3 * head + products
    update = 2 * candidate.local_bytes("full", "adapter", "optimizer")
    update += candidate.update_gradient_bytes * (2 + 2 * candidate.accumulation)
    return Work(
        flops,
        recompute,
        per_micro_batch * candidate.accumulation,
        elementwise * candidate.accumulation,
        update,
        _host_bytes(candidate, layers * weight_reads),
        tokens,
        _host_exposed_bytes(candidate),
    )


def attention_flops(spec: ModelSpec, length: int) -> float:
    """Forward operations per token of attention's two products in all layers, at half the square or in the window."""
    total = 0.0
    for _, repeats, layer, _ in spec.positions():
        for cost in (block.cost(spec.embed) for block in layer.blocks):
            keys = length / 2 if cost.window is None else min(length / 2, cost.window)
            total += repeats * cost.pairs * keys
    return total


def mean_width(spec: ModelSpec, axis: str, tp: int) -> float:
    """Elements per token and layer, on one device of tp, of the widest array along a logical axis: the layers' mean."""
    total = 0.0
    for _, repeats, layer, _ in spec.positions():
        arrays = [one for block in layer.blocks for one in block.cost(spec.embed).activations if one.axis == axis]
        total += repeats * max((one.width / min(tp, one.units) for one in arrays), default=0.0)
    return total / spec.layers


def mean_heads(spec: ModelSpec) -> float:
    """Attention heads of a layer: the layers' mean."""
    total = 0.0
    for _, repeats, layer, _ in spec.positions():
        arrays = [one for block in layer.blocks for one in block.cost(spec.embed).activations if one.axis == "heads"]
        total += repeats * max((one.units for one in arrays), default=0)
    return total / spec.layers


def _activation_traffic(candidate: Candidate) -> tuple[float, float]:
    """Bytes of one micro-batch through device memory in all passes: (of matrix products, of what lies between them)."""
    spec, tp = candidate.workload.spec, candidate.mesh.tp
    mixed, ffn = mean_width(spec, "heads", tp), mean_width(spec, "ffn", tp)
    heads = mixed + 2 * mean_width(spec, "kv_heads", 1) / tp
    # Elements per token and layer: q, k, v; attention; o; gate and up; down.
    products = (
        (spec.embed + heads) + (heads + mixed) + (mixed + spec.embed) + (spec.embed + 2 * ffn) + (ffn + spec.embed)
    )
    # Two norms, rotation, the activation between gate and up, two residual sums.
    elementwise = 2 * 2 * spec.embed + 2 * heads + 3 * ffn + 2 * 3 * spec.embed
    passes = 3 + {"none": 0.0, "selective": 0.5, "full": 1.0}[candidate.remat]
    scale = candidate.activation_itemsize * candidate.tokens * spec.layers * passes
    # Float32 logits are written, read for the loss, turned into their gradient, and read by the backward products.
    logits = 4 * candidate.tokens * spec.vocab / tp * 4
    return scale * products, scale * elementwise + logits


def _host_bytes(candidate: Candidate, weight_bytes: float) -> float:
    """Bytes transferred to and from host memory in one update, by what `compute.offload` names."""
    total = 0.0
    if "residual" in candidate.offload:
        total += 2 * candidate.accumulation * residual_bytes(candidate)
    if "optimizer" in candidate.offload:
        total += 2 * candidate.local_bytes("optimizer")
    if candidate.streams_trained_weights:  # fetched forward and backward, and written back after the update
        total += 3 * candidate.local_bytes("full") + 2 * candidate.local_bytes("stacked")
    elif "weights" in candidate.offload:
        total += candidate.accumulation * weight_bytes / (candidate.mesh.fsdp * candidate.mesh.cp)
    return total


def _host_exposed_bytes(candidate: Candidate) -> float:
    """In the backward pass of a streamed model only one direction of the transfers overlaps with the products."""
    if not candidate.streams_trained_weights:
        return 0.0
    return candidate.local_bytes("full") + (
        candidate.local_bytes("optimizer") if "optimizer" in candidate.offload else 0.0
    )


def residual_bytes(candidate: Candidate) -> float:
    """The residual stream saved at every layer's input, of one micro-batch on one device."""
    spec = candidate.workload.spec
    groups = sum(stack.repeats for stack in spec.stacks)
    return candidate.tokens * spec.embed * candidate.activation_itemsize * groups


def _backward_fraction(candidate: Candidate, sizes: dict[str, int], trained: set[str]) -> float:
    """The share of the layers' elements at or above the lowest layer with anything trained."""
    workload = candidate.workload
    if "embed/weight" in trained or isinstance(workload.method, LoraConfig):
        return 1.0
    reached, passed = False, 0
    for key, _, _, _ in workload.spec.positions():
        prefix = f"layers/{key}/"
        reached = reached or any(path.startswith(prefix) for path in trained)
        passed += sum(size for path, size in sizes.items() if path.startswith(prefix)) if reached else 0
    return passed / max(1, sum(sizes.values()))


def is_matrix(path: str) -> bool:
    """Whether the parameter at a path multiplies tokens."""
    return path.endswith("/weight") and "norm" not in path
