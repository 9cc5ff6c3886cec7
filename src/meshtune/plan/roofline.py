"""How long an update takes: the least time its operations, its memory traffic and its messages allow, and a likely one.

The roofline (Williams et al., 2009) is a bound from data sheets: nothing is faster. The likely time takes what good
programs reach of a data sheet, and what can happen at the same time: matrix products run at the slower of their
arithmetic and their traffic, what lies between them follows, sums over devices are waited for, and gathered weights,
scattered gradients and passed-on keys hide behind the computation as far as that lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshtune.errors import UserError
from meshtune.plan.collectives import Collective
from meshtune.plan.hardware import Device, Target
from meshtune.plan.work import Work

# Shares of a data sheet's figures that are reached, by assumption; the end of every run says how far off they were.
# AMD reports 75% of Infinity Fabric's 64 GB/s a link for payload (rocm.blogs.amd.com, "Understanding RCCL bandwidth").
REACHED = {"compute": 0.7, "memory": 0.8, "links": 0.75, "host": 0.8}
# Seconds before the first byte of a message arrives, inside a host and between hosts (by assumption, too).
LATENCY = {"link": 10e-6, "network": 30e-6}
HIDDEN = ("all-gather", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one update. `compute`, `memory`, `link`, `network` and `host` are bounds, each as if it were alone.

    `seconds` is the likely time, `waited` its part in which devices only wait for each other. `flops` is the model's
    own of one device, `peak` its device's rate for them.
    """

    compute: float
    memory: float
    link: float
    network: float
    host: float
    seconds: float
    waited: float
    flops: float
    peak: float
    memory_bytes: float
    tokens: float

    @property
    def bound(self) -> float:
        """No program that does this work is faster."""
        return max(self.compute, self.memory, self.link, self.network, self.host)

    @property
    def bound_by(self) -> str:
        """What takes longest at the rates that are reached: compute, memory, link, network or host."""
        return max(self.at_reached, key=self.at_reached.__getitem__)

    @property
    def at_reached(self) -> dict[str, float]:
        """Seconds of each at the rates that are reached."""
        return {
            "compute": self.compute / REACHED["compute"],
            "memory": self.memory / REACHED["memory"],
            "link": self.link / REACHED["links"],
            "network": self.network / REACHED["links"],
            "host": self.host / REACHED["host"],
        }

    @property
    def mfu(self) -> float:
        """Share of the device's rate that the model's own operations take in the likely time."""
        return self.flops / (self.peak * self.seconds)

    @property
    def mfu_bound(self) -> float:
        """The same at the bound."""
        return self.flops / (self.peak * self.bound)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.tokens / self.seconds

    @property
    def intensity(self) -> float:
        """Operations for each byte of memory traffic."""
        return self.flops / self.memory_bytes


def roofline(
    work: Work, collectives: Sequence[Collective], target: Target, *, dtype: str = "bfloat16", turns: int = 1
) -> Roofline:
    """The times of `work` on one of the target's devices; `turns` is for loops that the program itself ends.

    Raises: UserError for a device whose speed is not described.
    """
    device = target.device
    peak = rate(device, "flops_f32" if dtype == "float32" else "flops_bf16")
    bandwidth = rate(device, "bandwidth")
    link, network, latency, waiting, hidden = 0.0, 0.0, 0.0, 0.0, 0.0
    for one in collectives:
        if one.group_size < 2:
            continue
        times = one.count * (turns if one.open else 1)
        far = one.hosts(target.each) > 1
        seconds = times * exchange(one, target)
        network, link = (network + seconds, link) if far else (network, link + seconds)
        begun = times * LATENCY["network" if far else "link"]
        latency += begun
        if one.kind in HIDDEN:
            hidden += seconds / REACHED["links"] + begun
        else:
            waiting += seconds / REACHED["links"] + begun
    compute = (work.flops + work.again) / peak
    reached = bandwidth * REACHED["memory"]
    products = max(compute / REACHED["compute"], work.product_bytes / reached)
    busy = products + (work.other_bytes + work.update_bytes) / reached
    host = work.host_bytes / rate(device, "host_link") if work.host_bytes else 0.0
    alone = host * work.host_waited / work.host_bytes if work.host_bytes else 0.0
    hidden = max(hidden, (host - alone) / REACHED["host"])
    waited = waiting + alone / REACHED["host"] + max(0.0, hidden - busy)
    return Roofline(
        compute=compute,
        memory=work.memory_bytes / bandwidth,
        link=link,
        network=network,
        host=host,
        seconds=busy + waited,
        waited=waited,
        flops=work.flops,
        peak=peak,
        memory_bytes=work.memory_bytes,
        tokens=work.tokens,
    )


def exchange(one: Collective, target: Target) -> float:
    """Seconds of one run of a collective operation, at the data sheet's rates.

    Inside a host all goes at the link's rate. What is gathered or summed over hosts goes in as many rings as a host has
    devices of the group, each through the port of another: a host's ports count together, and they or the link decide.
    NCCL had 75 GB/s between two hosts of eight A100 with a port of 100 Gb/s each (its issue 495), 86 with four ports
    of 200 (nccl-tests, issue 175). What is passed on leaves a host through one port; of what all send to all, the part
    for other hosts leaves through each device's own.
    """
    device, link, hosts = target.device, rate(target.device, "link"), one.hosts(target.each)
    if hosts == 1:
        return one.moved / link
    together, network = one.group_size / hosts, rate(device, "network")
    ports = network * together / (target.each if device.shared_network else 1)
    if one.kind == "collective-permute":
        return one.moved / min(link, network, ports)
    if "all-to-all" in one.kind:
        leaving = one.bytes * (1 - together / one.group_size)
        return max(one.moved / link, leaving * together / ports)
    return one.moved / min(link, ports)


def rate(device: Device, name: str) -> float:
    """A speed of a device. Raises: UserError where its description lacks it."""
    value = getattr(device, name)
    if value is None:
        raise UserError(
            f"how fast {device.name} is, is not described: {name} is missing",
            where=f"[{device.name}]",
            fix="give bandwidth, flops_bf16, flops_f32, link, network and host_link as plan/hardware.toml does",
        )
    return value
