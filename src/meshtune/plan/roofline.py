"""Predicts the time of an update: a roofline bound from data sheets, and an expected time.

The roofline (Williams et al., 2009) is a lower bound on time: arithmetic, memory traffic and messages at the rates of
the data sheet. The expected time assumes the share of those rates that well-tuned programs reach, and models overlap:
matrix products take the larger of their arithmetic and memory time, element-wise operations follow them, all-reduces
are exposed, and weight gathers, gradient scatters and the ring of context parallelism overlap with computation for as
long as it lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshtune.errors import UserError
from meshtune.plan.collectives import Collective
from meshtune.plan.hardware import Device, Target
from meshtune.plan.work import Work

# Assumed efficiencies: the share of the data sheet's rates that programs reach. Every run prints predicted beside
# measured time. AMD reports 75% of Infinity Fabric's 64 GB/s per link for payload (rocm.blogs.amd.com, "Understanding
# RCCL bandwidth").
EFFICIENCY = {"compute": 0.7, "memory": 0.8, "links": 0.75, "host": 0.8}
# Assumed latency of a message in seconds, inside a host and between hosts.
LATENCY = {"link": 10e-6, "network": 30e-6}
OVERLAPPED = ("all-gather", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one update. `compute`, `memory`, `link`, `network` and `host` are bounds for each resource alone.

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
        seconds = times * collective_seconds(collective, target)
        network, link = (network + seconds, link) if crosses_hosts else (network, link + seconds)
        expected = seconds / EFFICIENCY["links"] + times * LATENCY["network" if crosses_hosts else "link"]
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


def collective_seconds(collective: Collective, target: Target) -> float:
    """Seconds of one run of a collective operation at the rates of the data sheet, without latency.

    Within a host everything moves at the link's rate. A gather or reduction across hosts runs as many rings as a host
    has members of the group, each through another device's port, so the ports of a host add up, and the slower of them
    and the link decides. NCCL reached 75 GB/s between two hosts of eight A100 with a 100 Gb/s port each (its issue
    495), and 86 GB/s with four ports of 200 Gb/s (nccl-tests, issue 175). A permutation leaves a host through a single
    port. In an all-to-all, each device sends the share meant for other hosts through its own port.
    """
    device, link = target.device, device_rate(target.device, "link")
    hosts = collective.hosts(target.per_host)
    if hosts == 1:
        return collective.bytes_sent / link
    members_per_host, network = collective.group_size / hosts, device_rate(device, "network")
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
            fix="give bandwidth, flops_bf16, flops_f32, link, network and host_link as plan/hardware.toml does",
        )
    return value
