"""What an update asks of a device: floating-point operations, bytes through its memory, bytes to and from the host.

The count of operations is the convention of published figures: a product of a token with a weight is 2 operations
forward, 2 for the gradient of its input wherever something below it is trained, and 2 for the gradient of the weight if
that is trained (4N and 6N a token in all for LoRA and full tuning), and attention at half its square. What is computed
again in the backward pass is counted apart.
"""

from __future__ import annotations

import dataclasses
import math

from meshtune.adapters.config import LoraConfig
from meshtune.model.spec import ModelSpec
from meshtune.plan.case import Case


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device and one update. `flops` is the model's own, `again` what is computed a second time.

    Bytes that pass through device memory: `product_bytes` are the factors and results of matrix products (weights as
    often as they are read), `other_bytes` everything between the products, `update_bytes` gradients and the optimizer.
    `host_bytes` go to or come from the host; of these `host_waited` go while nothing is computed. `tokens` are those of
    all devices.
    """

    flops: float
    again: float
    product_bytes: float
    other_bytes: float
    update_bytes: float
    host_bytes: float
    tokens: float
    host_waited: float = 0.0

    @property
    def memory_bytes(self) -> float:
        return self.product_bytes + self.other_bytes + self.update_bytes


@dataclasses.dataclass(frozen=True)
class Weights:
    """Numbers in the matrices of all layers, of the output head, and of those that are trained (adapters apart)."""

    layers: int
    head: int
    trained: int
    adapters: int
    below: float  # share of the layers' numbers through which a gradient passes


def weights_of(case: Case) -> Weights:
    """The model's matrices by what becomes of them."""
    spec = case.base.spec
    matrices = {path: leaf for path, leaf in case.base.parameters.items() if is_matrix(path)}
    in_layers = {path: leaf.size for path, leaf in matrices.items() if path.startswith("layers/")}
    head = matrices[spec.output].size
    names = {one.path for one in case.base.kept if one.role == "full"}
    full = sum(size for path, size in in_layers.items() if path in names)
    full += head if spec.output in names else 0
    adapters = sum(math.prod(one.shape) for one in case.base.kept if one.role == "adapter")
    return Weights(sum(in_layers.values()), head, full, adapters, _below(case, in_layers, names))


def work_of(case: Case) -> Work:
    """The work of one update, everything split evenly over the devices."""
    spec, weights = case.base.spec, weights_of(case)
    tokens = case.rows * case.length * case.accumulation
    own = tokens / case.mesh.devices
    scores = attention_flops(spec, case.length)
    forward = 2 * (weights.layers + weights.head) + scores
    inputs = 2 * (weights.layers * weights.below + weights.head) + 2 * scores * weights.below
    flops = own * (forward + inputs + 2 * weights.trained + 6 * weights.adapters)
    again = own * scores / 2  # the weights of attention, made again in its backward pass
    if case.remat == "full":
        again += own * (2 * weights.layers + scores) * weights.below
    products, others = _activation_bytes(case)
    layers, head = (n * case.narrow / case.mesh.tp for n in (weights.layers, weights.head))
    readings = 1 + weights.below * (2 if case.remat == "full" else 1)
    gathered = 2 if case.mesh.fsdp * case.mesh.cp > 1 else 0  # written once and read at its own shard's place
    per_micro = layers * (readings + gathered) + 3 * head + products
    update = 2 * case.held("full", "adapter", "optimizer") + case.summed * (2 + 2 * case.accumulation)
    return Work(
        flops,
        again,
        per_micro * case.accumulation,
        others * case.accumulation,
        update,
        _host_bytes(case, layers * readings),
        tokens,
        _host_waited(case),
    )


def attention_flops(spec: ModelSpec, length: int) -> float:
    """Of attention's two products for one token of all layers, forward, at half the square (or within the window)."""
    total = 0.0
    for _, repeats, layer, _ in spec.positions():
        seen = length / 2 if layer.window is None else min(length / 2, layer.window)
        total += repeats * 4 * seen * spec.heads * spec.head_dim
    return total


def _activation_bytes(case: Case) -> tuple[float, float]:
    """(factors and results of products, what lies between them) of one micro-batch: forward, again and backward."""
    spec, tp = case.base.spec, case.mesh.tp
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim / tp
    ffn, mixed = spec.ffn / tp, spec.heads * spec.head_dim / tp
    # Numbers a token and layer. q, k, v; attention; o; gate and up; down.
    products = (
        (spec.embed + heads) + (heads + mixed) + (mixed + spec.embed) + (spec.embed + 2 * ffn) + (ffn + spec.embed)
    )
    # Two norms, rotation, the activation between gate and up, two residual sums.
    others = 2 * 2 * spec.embed + 2 * heads + 3 * ffn + 2 * 3 * spec.embed
    passes = 3 + {"none": 0.0, "selective": 0.5, "full": 1.0}[case.remat]
    share = case.narrow * case.tokens * spec.layers * passes
    logits = 4 * case.tokens * spec.vocab / tp * 4  # float32: made, read for the loss, turned into their gradient, used
    return share * products, share * others + logits


def _host_bytes(case: Case, weight_bytes: float) -> float:
    """What is fetched and sent in one update, by what `compute.offload` names."""
    found = 0.0
    if "residual" in case.offload:
        found += 2 * case.accumulation * residual_bytes(case)
    if "optimizer" in case.offload:
        found += 2 * case.held("optimizer")
    if case.streamed:  # forward, backward, and back with its update
        found += 3 * case.held("full") + 2 * case.held("stacked")
    elif "weights" in case.offload:
        found += case.accumulation * weight_bytes / (case.mesh.fsdp * case.mesh.cp)
    return found


def _host_waited(case: Case) -> float:
    """In the backward pass of a streamed model one direction of its messages goes beside the products, not both."""
    if not case.streamed:
        return 0.0
    return case.held("full") + (case.held("optimizer") if "optimizer" in case.offload else 0.0)


def residual_bytes(case: Case) -> float:
    """The stream that enters every layer, of one micro-batch on one device."""
    groups = sum(stack.repeats for stack in case.base.spec.stacks)
    return case.tokens * case.base.spec.embed * case.narrow * groups


def _below(case: Case, sizes: dict[str, int], trained: set[str]) -> float:
    """The share of the layers that lie at or above the lowest one with anything trained."""
    if "embed/weight" in trained or isinstance(case.base.method, LoraConfig):
        return 1.0
    first, passed = False, 0
    for key, _, _, _ in case.base.spec.positions():
        mine = [path for path in sizes if path.startswith(f"layers/{key}/")]
        first = first or any(path.startswith(f"layers/{key}/") for path in trained)
        passed += sum(sizes[path] for path in mine) if first else 0
    return passed / max(1, sum(sizes.values()))


def is_matrix(path: str) -> bool:
    """Whether the parameter at a path multiplies tokens."""
    return path.endswith("/weight") and "norm" not in path
