"""The work of a training step and its time on a device, by the roofline model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from meshtune.costs.collectives import Collective
from meshtune.costs.hardware import Device, Target
from meshtune.costs.workload import MATRICES, Candidate, LayerCost, PersistentArray, Workload
from meshtune.errors import UserError
from meshtune.objectives.answers import CRITIC


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one update on one device. `flops` are the model's own; `recompute_flops` come on top.

    Bytes through device memory: `product_bytes` are operands and results of matrix products (weights each time they are
    read), `elementwise_bytes` everything between the products, `update_bytes` gradients and optimizer. `host_bytes` are
    transferred to and from host memory; of these `host_exposed_bytes` do not overlap with computation. `tokens` are
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
class ActiveWeights:
    """Elements of weights that multiply a token, of experts only the active ones: in all layers, the output head,
    weights trained in full, and adapters. A gradient passes through the share `backward_fraction` of the layers'
    elements.
    """

    layers: int
    head: int
    trained: float
    adapters: float
    backward_fraction: float


def active_weights(candidate: Candidate) -> ActiveWeights:
    """Counts the active elements of the model's weights by use."""
    workload = candidate.workload
    blocks = [block for layer in workload.layers for block in layer.blocks]

    def active_size(array: PersistentArray) -> float:
        path = array.path.removeprefix(f"{CRITIC}/")
        block = next((block for block in blocks if path.startswith(block.prefix)), None)
        return array.size * (block.active_experts if block is not None and "experts" in array.axes else 1.0)

    full = [array for array in workload.persistent if array.role == "full"]
    multiplied = [array for array in full if array.path == workload.spec.output or _is_multiplied(workload, array)]
    adapters = sum(active_size(array) for array in workload.persistent if array.role == "adapter")
    return ActiveWeights(
        layers=sum(layer.repeats * layer.active_weights for layer in workload.layers),
        head=workload.parameters[workload.spec.output].size,
        trained=sum(active_size(array) for array in multiplied),
        adapters=adapters,
        backward_fraction=_backward_fraction(workload, {array.path for array in full}),
    )


def _is_multiplied(workload: Workload, array: PersistentArray) -> bool:
    role = workload.parameters[array.path.removeprefix(f"{CRITIC}/")].role
    return array.is_stacked and role in (*MATRICES, "experts")


def work_of(candidate: Candidate) -> Work:
    """The work of one update, split evenly over the devices. A critic goes through layers like the model's."""
    workload, mesh, weights = candidate.workload, candidate.mesh, active_weights(candidate)
    of_layers = workload.models * weights.layers
    tokens = candidate.rows * candidate.length * candidate.accumulation
    device_tokens = tokens / mesh.devices
    scores = workload.models * attention_flops(workload.layers, candidate.length)
    fraction = weights.backward_fraction
    forward = 2 * (of_layers + weights.head) + scores
    input_gradients = 2 * (of_layers * fraction + weights.head) + 2 * scores * fraction
    flops = device_tokens * (forward + input_gradients + 2 * weights.trained + 6 * weights.adapters)
    recompute = device_tokens * scores / 2  # attention's scores are recomputed in its backward pass
    if candidate.remat == "full":
        recompute += device_tokens * (2 * of_layers + scores) * fraction
    tower = _tower_flops(candidate)
    flops += tower * (3 if workload.tower is not None and workload.tower.trained else 1)
    products, elementwise = _activation_traffic(candidate)
    layers = workload.models * _layer_weights(candidate) * candidate.activation_itemsize
    weight_reads = 1 + fraction * (2 if candidate.remat == "full" else 1)
    gather_traffic = 2 if candidate.weight_shards > 1 else 0  # gathered weights are written and read
    per_micro_batch = layers * (weight_reads + gather_traffic) + _head_traffic(candidate, weights.head) + products
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


def _tower_flops(candidate: Candidate) -> float:
    """Operations of one forward pass of the tower on a device, for all pictures of an update."""
    tower, vision = candidate.workload.tower, candidate.workload.spec.vision
    if tower is None or vision is None:
        return 0.0
    keys = 2 * (vision.tile or candidate.patches / max(1.0, candidate.local_rows))  # all of them: twice a causal half
    weights = sum(layer.repeats * layer.active_weights for layer in tower.layers)
    per_patch = 2 * (weights + vision.pixels * vision.width) + attention_flops(tower.layers, int(keys))
    return candidate.accumulation * candidate.patches / candidate.mesh.cp / candidate.mesh.tp * per_patch


def _head_traffic(candidate: Candidate, size: int) -> float:
    """Bytes of the head of `size` numbers that one micro-batch moves on a device: each chunk of the loss reads it
    twice, and reads and writes its float32 gradient where it is trained."""
    output = candidate.workload.spec.output
    trained = any(array.role == "full" and array.path == output for array in candidate.workload.persistent)
    bytes_of_chunk = size * (2 * candidate.activation_itemsize + (8 if trained else 0)) / candidate.mesh.tp
    return candidate.loss_chunks * bytes_of_chunk


def attention_flops(layers: Sequence[LayerCost], length: int) -> float:
    """Forward operations per token on pairs of tokens in all layers, at half the square or within the window."""
    total = 0.0
    for layer in layers:
        for block in layer.blocks:
            keys = length / 2 if block.cost.window is None else min(length / 2, block.cost.window)
            total += layer.repeats * block.cost.pairs * keys
    return total


def _layer_weights(candidate: Candidate) -> float:
    """Elements of the weights of all layers that one device reads, all experts of its share of ep included."""
    mesh = candidate.mesh
    return sum(
        layer.repeats * block.local_weights(mesh.tp, mesh.ep)
        for layer in candidate.workload.layers
        for block in layer.blocks
    )


def _activation_traffic(candidate: Candidate) -> tuple[float, float]:
    """Bytes of one micro-batch through device memory in all passes: (of matrix products, of what lies between them)."""
    spec, tp = candidate.workload.spec, candidate.mesh.tp
    products = elementwise = 0.0  # elements per token
    for layer in candidate.workload.layers:
        for block in layer.blocks:
            products += layer.repeats * (2 * spec.embed + block.product_width(tp))
            # A norm reads and writes the residual stream; the residual sum reads two arrays and writes one.
            elementwise += layer.repeats * (5 * spec.embed + block.elementwise_width(tp, candidate.routed_rows(block)))
    passes = 3 + {"none": 0.0, "selective": 0.5, "full": 1.0}[candidate.remat]
    scale = candidate.activation_itemsize * candidate.tokens * passes * candidate.workload.models
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
    if "tables" in candidate.offload:
        total += candidate.accumulation * candidate.local_bytes("tables")
    if candidate.streams_trained_weights:  # fetched forward and backward, and written back after the update
        total += 3 * candidate.local_bytes("full") + 2 * candidate.local_bytes("stacked")
    elif "weights" in candidate.offload:
        total += candidate.accumulation * weight_bytes / candidate.weight_shards
    return total


def _host_exposed_bytes(candidate: Candidate) -> float:
    """In the backward pass of a streamed model only one direction of the transfers overlaps with the products."""
    if not candidate.streams_trained_weights:
        return 0.0
    return candidate.local_bytes("full") + (
        candidate.local_bytes("optimizer") if "optimizer" in candidate.offload else 0.0
    )


def residual_bytes(candidate: Candidate) -> float:
    """The residual stream saved at every layer's input, of one micro-batch on one device; a critic's too, whose forward
    pass precedes both backward passes."""
    spec, layers = candidate.workload.spec, candidate.workload.models * candidate.workload.spec.layers
    return candidate.tokens * spec.residual * candidate.activation_itemsize * layers


def _backward_fraction(workload: Workload, trained: set[str]) -> float:
    """The share of the layers' active weights at or above the lowest layer with anything trained."""
    if workload.method.adapters is not None or any(path.split("/")[0] in workload.spec.before for path in trained):
        return 1.0
    reached, passed, total = False, 0, 0
    for layer in workload.layers:
        reached = reached or any(path.startswith(layer.prefix) for path in trained)
        weights = layer.repeats * layer.active_weights
        passed += weights if reached else 0
        total += weights
    return passed / max(1, total)


# Assumed efficiencies: the share of the data sheet's rates that programs reach. Every run prints predicted beside
# measured time. AMD reports 75% of Infinity Fabric's 64 GB/s per link for payload (rocm.blogs.amd.com, "Understanding
# RCCL bandwidth").
EFFICIENCY = {"compute": 0.7, "memory": 0.8, "links": 0.75, "host": 0.8}
# Assumed latency of a message in seconds, inside a host and between hosts; and of one more step of a ring between
# hosts, and between the neighbours of a TPU's torus.
LATENCY = {"link": 10e-6, "network": 30e-6}
STEP_LATENCY = {"ring": 3e-6, "torus": 1e-6}
OVERLAPPED = ("all-gather", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one update. `compute`, `memory`, `link`, `network` and `host` are the bounds of each resource.

    `seconds` is the expected time and `exposed` the part of it spent waiting for messages or the host. `flops` are the
    model's own operations on one device (without recomputation), `peak` the device's rate for them in 1/s.
    `memory_bytes` pass through one device's memory; `tokens` are those of all devices.
    """

    compute: float
    memory: float
    link: float
    network: float
    host: float
    seconds: float
    exposed: float
    flops: float
    peak: float
    memory_bytes: float
    tokens: float

    @property
    def bound(self) -> float:
        """The lower bound in seconds: no program that does this work is faster."""
        return max(self.compute, self.memory, self.link, self.network, self.host)

    @property
    def bound_by(self) -> str:
        """The resource that takes longest at its achievable rate: compute, memory, link, network or host."""
        return max(self.achievable, key=self.achievable.__getitem__)

    @property
    def achievable(self) -> dict[str, float]:
        """Seconds of each resource at its achievable rate, the data sheet's times EFFICIENCY."""
        return {
            "compute": self.compute / EFFICIENCY["compute"],
            "memory": self.memory / EFFICIENCY["memory"],
            "link": self.link / EFFICIENCY["links"],
            "network": self.network / EFFICIENCY["links"],
            "host": self.host / EFFICIENCY["host"],
        }

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation at the expected time (PaLM, appendix B)."""
        return self.flops / (self.peak * self.seconds)

    @property
    def mfu_bound(self) -> float:
        """Model FLOPs utilisation at the bound: the most that any program can have."""
        return self.flops / (self.peak * self.bound)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.tokens / self.seconds

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations per byte of memory traffic."""
        return self.flops / self.memory_bytes


def roofline(
    work: Work, collectives: Sequence[Collective], target: Target, *, dtype: str = "bfloat16", trip_count: int = 1
) -> Roofline:
    """Predicts the time of `work` and `collectives` on the devices of `target`.

    `dtype` is the compute dtype; `trip_count` is assumed for loops whose trip count the compiler does not know.
    Raises: UserError for a device whose speeds are not described.
    """
    device = target.device
    peak = device_rate(device, "flops_f32" if dtype == "float32" else "flops_bf16")
    bandwidth = device_rate(device, "bandwidth")
    link, network, exposed, overlapped = 0.0, 0.0, 0.0, 0.0
    for collective in collectives:
        if collective.group_size < 2:
            continue
        times = collective.count * (trip_count if collective.unknown_trip_count else 1)
        crosses_hosts = collective.hosts(target.per_host) > 1
        latency = collective_latency(collective, target)
        seconds = times * collective_seconds(collective, target)
        network, link = (network + seconds, link) if crosses_hosts else (network, link + seconds)
        expected = seconds / EFFICIENCY["links"] + times * latency
        if collective.kind in OVERLAPPED:
            overlapped += expected
        else:
            exposed += expected
    compute = (work.flops + work.recompute_flops) / peak
    achievable_bandwidth = bandwidth * EFFICIENCY["memory"]
    products = max(compute / EFFICIENCY["compute"], work.product_bytes / achievable_bandwidth)
    busy = products + (work.elementwise_bytes + work.update_bytes) / achievable_bandwidth
    host = work.host_bytes / device_rate(device, "host_link") if work.host_bytes else 0.0
    host_exposed = host * work.host_exposed_bytes / work.host_bytes if work.host_bytes else 0.0
    overlapped = max(overlapped, (host - host_exposed) / EFFICIENCY["host"])
    exposed = exposed + host_exposed / EFFICIENCY["host"] + max(0.0, overlapped - busy)
    return Roofline(
        compute=compute,
        memory=work.memory_bytes / bandwidth,
        link=link,
        network=network,
        host=host,
        seconds=busy + exposed,
        exposed=exposed,
        flops=work.flops,
        peak=peak,
        memory_bytes=work.memory_bytes,
        tokens=work.tokens,
    )


def collective_latency(collective: Collective, target: Target) -> float:
    """Seconds that one run of a collective operation takes however few bytes it moves.

    It grows with the steps: of a ring of hosts for gathers, of two trees for reductions (NCCL), and of the rings along
    the dimensions of a torus, which are taken to be a cube. A permutation has one step.
    """
    hosts = collective.hosts(target.per_host)
    if hosts == 1:
        return LATENCY["link"]
    if collective.kind == "collective-permute":
        return LATENCY["network"]
    slices = collective.hosts(target.devices // target.slices)
    if target.device.platform == "tpu":
        torus = STEP_LATENCY["torus"] * 3 * (collective.group_size / slices) ** (1 / 3)
        return LATENCY["network"] + torus + STEP_LATENCY["ring"] * (slices - 1)
    steps = 2 * math.log2(hosts) if collective.kind == "all-reduce" else hosts - 1
    return LATENCY["network"] + STEP_LATENCY["ring"] * (steps - 1)


def collective_seconds(collective: Collective, target: Target) -> float:
    """Seconds of one run of a collective operation at the rates of the data sheet, without latency.

    Within a host everything moves at the link's rate. A gather or reduction across hosts runs as many rings as a host
    has members of the group, each through another device's port, so the ports of a host add up, and the slower of them
    and the link decides. NCCL reached 75 GB/s between two hosts of eight A100 with a 100 Gb/s port each (its issue
    495), and 86 GB/s with four ports of 200 Gb/s (nccl-tests, issue 175). A permutation leaves a host through a single
    port. In an all-to-all, each device sends the share meant for other hosts through its own port. Across slices the
    same holds of the slices and the network between them.
    """
    device, link = target.device, device_rate(target.device, "link")
    hosts = collective.hosts(target.per_host)
    if hosts == 1:
        return collective.bytes_sent / link
    slices = collective.hosts(target.devices // target.slices)
    across_slices = slices > 1 and device.dcn is not None
    network = device_rate(device, "dcn" if across_slices else "network")
    members_per_host = collective.group_size / (slices if across_slices else hosts)
    ports = network * members_per_host / (target.per_host if device.shared_network else 1)
    if collective.kind == "collective-permute":
        return collective.bytes_sent / min(link, network, ports)
    if "all-to-all" in collective.kind:
        leaving = collective.bytes * (1 - members_per_host / collective.group_size)
        return max(collective.bytes_sent / link, leaving * members_per_host / ports)
    return collective.bytes_sent / min(link, ports)


def device_rate(device: Device, name: str) -> float:
    """A speed of a device by field name. Raises: UserError where the description of the device lacks it."""
    value = getattr(device, name)
    if value is None:
        raise UserError(
            f"the speed of {device.name} is not described: {name} is missing",
            where=f"[{device.name}]",
            fix="give bandwidth, flops_bf16, flops_f32, link, network and host_link as costs/hardware.toml does",
        )
    return value
