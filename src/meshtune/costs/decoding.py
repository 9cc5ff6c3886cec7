"""The memory and time of generating: caches of rows, decode steps, and a rollout of an online stage."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from meshtune.arrays.tree import named_leaves
from meshtune.costs.collectives import Collective
from meshtune.costs.estimate import mesh_group, persistent_bytes
from meshtune.costs.roofline import Roofline, Work, active_weights, attention_flops, roofline
from meshtune.costs.workload import Candidate, PersistentArray, Workload, bytes_per_element
from meshtune.mesh.layout import SHARDS, Layout
from meshtune.model.compute import CacheName
from meshtune.model.model_cache import READ_ROWS, ROOM, cache_specs, rows_bucket, slots_bucket
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import CRITIC
from meshtune.objectives.config import TEACHER

# Of a layer's largest cache array at once, decoded to its dtype: as XLA makes a step for GPUs that the kernel
# for stacked caches (kernels.attention.triton_decode) does not serve.
LAYER_COPIES = 4
LOGITS_COPIES = 3  # float32 arrays [rows, vocab] at once: scores, their processed form, a temporary one
COPYING = 3  # times that a layer's weights pass the memory where a step writes them out before their products
READ_COPIES = 2  # of the caches of rows that read their prompts, before they are in their place
LEAST_COPIED = 64 << 20  # bytes of weights that decode steps read from a copy: fewer stay in a CPU's own caches
COPIED_SHARE = 0.25  # of the machine's memory, which that copy may take on a CPU


def fits_copy(size: float, free: float) -> bool:
    """Whether decode steps on a GPU read the layers' weights, `size` bytes, from a copy by layer (generate.weights):
    where as much stays free as it takes. It gives way to caches, so that no plan needs memory for it."""
    return LEAST_COPIED <= size <= free / 2


def cache_bytes(
    spec: ModelSpec, layout: Layout, rows: int, slots: int, dtype: str, cache: CacheName | None = None
) -> float:
    """Bytes on each device of the caches of `rows` rows of `slots` tokens."""
    return sum(array.local_bytes(layout) for array in _caches(spec, rows, slots, dtype, cache))


def decode_bytes(
    spec: ModelSpec, layout: Layout, rows: int, slots: int, dtype: str, cache: CacheName | None = None
) -> float:
    """Bytes on each device that a decode step of `rows` rows takes, without their caches.

    Copies of a layer's largest array and of the logits: within 5% of what XLA's compilers for GPUs report for an 8B
    (tests/plan).
    """

    def layer_bytes(array: PersistentArray) -> float:
        return array.local_bytes(layout) / array.shape[0] * bytes_per_element(dtype) / array.itemsize

    layer = max(map(layer_bytes, _caches(spec, rows, slots, dtype, cache)), default=0.0)
    return LAYER_COPIES * layer + 4 * LOGITS_COPIES * spec.vocab * local_rows(layout, rows)


def local_rows(layout: Layout, rows: int) -> float:
    """Rows of a generation on each device: all of them where the mesh does not divide their number."""
    ways = layout.size("dp", "fsdp", "ep")
    return rows / ways if rows % ways == 0 else rows


def decode_operations(workload: Workload, length: int) -> float:
    """Operations of one row's decode step, over all devices."""
    spec, total = workload.spec, 2.0 * workload.spec.embed * workload.spec.vocab
    for layer in workload.layers:
        for block in layer.blocks:
            visible = length if block.cost.window is None else min(length, block.cost.window)
            total += layer.repeats * (2.0 * block.cost.weights + block.cost.pairs * visible)
    return total if not spec.scored else total - 2.0 * spec.embed * spec.vocab


def _caches(spec: ModelSpec, rows: int, slots: int, dtype: str, cache: CacheName | None) -> list[PersistentArray]:
    return [
        PersistentArray("cache", path, leaf.shape, bytes_per_element(leaf.dtype), leaf.axes, leaf.units)
        for path, leaf in named_leaves(cache_specs(spec, rows, slots, dtype, cache))
    ]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and completions, the longest completion's, and the source of the numbers."""

    prompt: float
    completion: float
    longest: float
    source: str


@dataclasses.dataclass(frozen=True)
class RolloutCost:
    """A rollout on one device, with the caches of `rows` rows of up to `slots` tokens.

    `resident` are the bytes of what the update needs too: weights, adapters and optimizer state. `caches` and
    `temporaries` are gone before the update. `reading` (of prompts), `decoding` and `scoring` (passes for old and
    reference log-probabilities) are seconds of a rollout, which serves `updates` updates. An update computes
    `micro_batches` micro-batches; the others are empty.
    """

    rows: int
    slots: int
    resident: int
    caches: int
    temporaries: int
    reading: float
    decoding: float
    scoring: float
    completions: int
    updates: int
    micro_batches: int
    lengths: Lengths

    @property
    def device_bytes(self) -> int:
        return self.resident + self.caches + self.temporaries

    @property
    def seconds(self) -> float:
        """Seconds of a rollout."""
        return self.reading + self.decoding + self.scoring

    @property
    def seconds_per_update(self) -> float:
        return self.seconds / self.updates

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of all devices together, while completions are decoded."""
        return self.completions * self.lengths.completion / self.decoding


def longest_lengths(candidate: Candidate) -> Lengths:
    """The worst case: every prompt with its completion fills data.max_length."""
    rollout = candidate.workload.recipe.rollout
    assert rollout is not None
    prompt = max(1, candidate.workload.recipe.data.max_length - rollout.max_tokens)
    return Lengths(prompt, rollout.max_tokens, rollout.max_tokens, "the worst case")


def filled_micro_batches(candidate: Candidate, lengths: Lengths) -> int:
    """Micro-batches of an update that hold completions, if all have the mean length."""
    recipe, options = candidate.workload.recipe, candidate.workload.recipe.rollout
    assert options is not None
    prompt, completion, samples = lengths.prompt - 1, max(1.0, lengths.completion), options.samples
    if not recipe.data.packing:
        fit = 1.0
    elif not candidate.shared_prompts:
        fit = candidate.length // (prompt + completion)
    elif groups := candidate.length // (prompt + samples * completion):
        fit = groups * samples
    else:
        fit = (candidate.length - prompt) // completion
    return min(candidate.accumulation, math.ceil(options.completions / max(1.0, fit) / candidate.rows))


def rollout_cost(candidate: Candidate, update: Roofline, rows: int, lengths: Lengths, passes: int) -> RolloutCost:
    """The cost of a rollout with `rows` rows decoded at once. `update` is the time of an update whose micro-batches
    hold completions of these lengths; `passes` are those that score a rollout."""
    recipe, spec, layout = candidate.workload.recipe, candidate.workload.spec, candidate.layout
    options, dtype = recipe.rollout, candidate.workload.precision.compute
    assert options is not None
    completions, rows = options.prompts * options.samples, rows_bucket(rows)
    longest = recipe.data.max_length
    first = min(slots_bucket(longest), slots_bucket(longest - options.max_tokens + min(options.max_tokens, ROOM)))
    slots = slots_bucket(longest)
    caches = cache_bytes(spec, layout, rows, slots, dtype)
    reading = READ_COPIES * cache_bytes(spec, layout, min(rows, READ_ROWS), first, dtype)
    temporary = max(
        decode_bytes(spec, layout, rows, slots, dtype) + _gathered_bytes(candidate),
        cache_bytes(spec, layout, rows, slots // 2, dtype) if slots > first else 0.0,  # moved into longer ones
        cache_bytes(spec, layout, rows, first, dtype) + reading - caches,
    )
    rounds = max(1.0, completions * lengths.completion / (rows * lengths.longest))
    decoding = sum(
        steps * _decode_step(candidate, rows, held).seconds
        for held, steps in _steps_by_slots(lengths, options.max_tokens)
    )
    weights = active_weights(candidate)
    per_token = 2 * (weights.layers + weights.head) + attention_flops(candidate.workload.layers, candidate.length)
    tokens = candidate.rows * candidate.length * filled_micro_batches(candidate, lengths) / candidate.mesh.devices
    forward = per_token * tokens / (update.compute * update.peak)  # the share of an update that is its forward pass
    return RolloutCost(
        rows=rows,
        slots=slots,
        resident=int(_resident_bytes(candidate)),
        caches=int(caches),
        temporaries=int(temporary + _copy_bytes(candidate)),
        reading=_read_prompts(candidate, options.prompts * lengths.prompt, lengths.prompt).seconds,
        decoding=rounds * decoding,
        scoring=passes * options.updates * forward * update.seconds,
        completions=completions,
        updates=options.updates * options.iterations,
        micro_batches=filled_micro_batches(candidate, lengths),
        lengths=lengths,
    )


def _copy_bytes(candidate: Candidate) -> float:
    """Bytes of the copy of the weights that decode steps on a CPU read (generate.weights)."""
    device, spec = candidate.target.device, candidate.workload.spec
    if device.platform != "cpu" or candidate.mesh.devices > 1 or candidate.workload.precision.compute != "float32":
        return 0.0
    size = _layer_bytes(candidate) + 4 * spec.vocab * spec.embed
    return size if not _converts(candidate) and LEAST_COPIED <= size <= COPIED_SHARE * device.memory else 0.0


def _layer_bytes(candidate: Candidate) -> float:
    """Bytes on one device of the layers' weights."""
    return _stored_bytes(candidate, "frozen") + _stored_bytes(candidate, "full")


def _slices(candidate: Candidate, caches: float) -> bool:
    """Whether a decode step on a GPU writes out each layer's weights, having no copy of them by layer."""
    if candidate.target.device.backend != "gpu":
        return False
    free = candidate.target.device.memory - _resident_bytes(candidate) - caches
    return candidate.mesh.devices > 1 or "weights" in candidate.offload or not fits_copy(_layer_bytes(candidate), free)


def _resident_bytes(candidate: Candidate) -> float:
    sizes = persistent_bytes(candidate)
    total = sizes["weights"] + sizes["adapters"] + sizes["optimizer"]
    on_host = {"optimizer": sizes["optimizer"]} | {
        part: candidate.local_bytes(role) for part, role in (("weights", "stacked"), ("tables", "tables"))
    }
    return total - sum(size for part, size in on_host.items() if part in candidate.offload)


def _converts(candidate: Candidate) -> bool:
    """Whether a layer's weights are written out before a product reads them: gathered from a mesh, decoded from a
    quantised base, or cast from another dtype."""
    stored = _layer_bytes(candidate)
    in_place = _layer_weights(candidate, math.inf) * candidate.activation_itemsize
    return candidate.weight_shards > 1 or not math.isclose(stored, in_place, rel_tol=0.05)


def _stored_bytes(candidate: Candidate, role: str) -> float:
    """Bytes on one device of the layers' weights of a role."""
    return sum(array.local_bytes(candidate.layout) for array in _generating(candidate, role))


def _generating(candidate: Candidate, role: str) -> Iterator[PersistentArray]:
    """The layers' arrays of a role, of the model that generates."""
    others = (f"{TEACHER}/", f"{CRITIC}/")
    return (
        a for a in candidate.workload.persistent if a.role == role and a.is_stacked and not a.path.startswith(others)
    )


def _gathered_bytes(candidate: Candidate) -> float:
    """Bytes of the largest layer's weights and of the head, where they are written out before their products."""
    if not _converts(candidate):
        return 0.0
    spec, mesh = candidate.workload.spec, candidate.mesh
    layers = (
        sum(block.local_weights(mesh.tp, mesh.ep) for block in layer.blocks) for layer in candidate.workload.layers
    )
    head = spec.vocab * spec.embed / mesh.tp if candidate.weight_shards > 1 else 0.0
    return candidate.activation_itemsize * (max(layers, default=0.0) + head)


def _layer_weights(candidate: Candidate, rows: float) -> float:
    """Elements of the layers' weights that one device multiplies `rows` rows by: of experts, those that some row is
    sent to. Routing is taken to be even, and independent from row to row."""
    mesh, total = candidate.mesh, 0.0
    for layer in candidate.workload.layers:
        for block in layer.blocks:
            share = 1 - (1 - block.active_experts) ** rows
            total += layer.repeats * (block.dense + block.experts * share / mesh.ep) / mesh.tp
    return total


def _decode_step(candidate: Candidate, rows: int, slots: int) -> Roofline:
    """The time of a decode step: every weight is read once, and all slots of every row's cache, as the attention
    backend `direct` does. Layers' weights that are written out before their products pass the memory three times."""
    spec, mesh, itemsize = candidate.workload.spec, candidate.mesh, candidate.activation_itemsize
    layout, dtype = candidate.layout, candidate.workload.precision.compute
    on_device = local_rows(layout, rows)
    layers = _layer_weights(candidate, rows) * itemsize
    caches = cache_bytes(spec, layout, rows, slots, dtype)
    written = _converts(candidate) or _slices(candidate, caches)
    read = layers * (COPYING if written else 1) + spec.vocab * spec.embed * itemsize / mesh.tp + caches
    work = Work(
        flops=on_device * decode_operations(candidate.workload, slots) / mesh.tp,
        recompute_flops=0.0,
        product_bytes=read,
        elementwise_bytes=0.0,
        update_bytes=0.0,
        host_bytes=candidate.local_bytes("stacked") if "weights" in candidate.offload else 0.0,
        tokens=rows,
    )
    return roofline(work, _collectives(candidate, on_device), candidate.target, dtype=dtype)


def _read_prompts(candidate: Candidate, tokens: float, length: float) -> Roofline:
    """The time of reading `tokens` tokens of prompts, once for all of their completions."""
    weights, devices = active_weights(candidate), candidate.mesh.devices
    flops = tokens / devices * (2 * weights.layers + attention_flops(candidate.workload.layers, int(length)))
    read = 3 * _layer_weights(candidate, math.inf) * candidate.activation_itemsize
    work = Work(flops, 0.0, read, 0.0, 0.0, 0.0, tokens)
    dtype = candidate.workload.precision.compute
    return roofline(work, _collectives(candidate, tokens / devices), candidate.target, dtype=dtype)


def _collectives(candidate: Candidate, tokens: float) -> list[Collective]:
    """The messages of a forward pass over `tokens` tokens on each device: weights are gathered, residuals reduced."""
    spec, mesh, itemsize = candidate.workload.spec, candidate.mesh, candidate.activation_itemsize
    stored = _stored_bytes(candidate, "frozen") * candidate.weight_shards
    stored += sum(array.size for array in _generating(candidate, "full")) * itemsize / mesh.tp
    blocks = sum(layer.repeats * len(layer.blocks) for layer in candidate.workload.layers)
    messages = [
        ("all-gather", stored / spec.layers, SHARDS, spec.layers),
        ("all-gather", spec.vocab * spec.embed * itemsize / mesh.tp, SHARDS, 1),
        ("all-reduce", tokens * spec.embed * itemsize, ("tp",), blocks),
    ]
    groups = ((kind, size, mesh_group(mesh.sizes, axes), count) for kind, size, axes, count in messages)
    return [Collective(kind, int(size), group, count) for kind, size, group, count in groups if len(group) > 1]


def _steps_by_slots(lengths: Lengths, max_tokens: int) -> Iterator[tuple[int, float]]:
    """(slots of the caches, decode steps with them) of completions that grow to the longest."""
    done, slots = 0.0, slots_bucket(math.ceil(lengths.prompt) + min(max_tokens, ROOM))
    while done < lengths.longest:
        steps = min(lengths.longest, max(1.0, slots - lengths.prompt)) - done
        yield slots, steps
        done, slots = done + steps, 2 * slots
