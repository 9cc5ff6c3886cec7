"""The devices that a program is compiled for: those of this job, or a described target."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from meshtune.costs.hardware import Device, Target, known_devices
from meshtune.setup.shortage import host_memory


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a job as JAX lists them, on all of its processes.

    `platform` is cpu, cuda, rocm or tpu. `chip` is the architecture of the devices; if empty, kernels query them.
    """

    platform: str
    devices: Sequence[jax.Device]
    chip: str = ""


def this_machine() -> Machine:
    """Returns the machine of the running job."""
    return Machine(platform_here(), tuple(jax.devices()))


def platform_here() -> str:
    """Returns JAX's default backend as cpu, cuda, rocm or tpu, where JAX itself calls both cuda and rocm gpu."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


ROUNDS = 4  # of each measurement; the fastest counts


def local_target(machine: Machine, hosts: int = 1) -> Target:
    """The devices of this job, spread evenly over `hosts`, as a target."""
    per_host = max(1, len(machine.devices) // hosts)
    return Target(hosts, per_host, local_device(machine, per_host))


def local_device(machine: Machine, per_host: int = 1) -> Device:
    """The device type of this machine as hardware.toml describes it, with the memory that the device reports;
    a CPU's is the host's, shared by the `per_host` devices that it simulates.

    CPUs are measured. An unknown device type gets the speeds of the known one of its platform with the closest memory:
    ranking candidates needs only the ratios of the speeds.
    """
    device = machine.devices[0]
    known = list(known_devices().values())
    named = next((entry for entry in known if entry.kind.lower() == str(device.device_kind).lower()), None)
    if machine.platform == "cpu":
        cpu = next(entry for entry in known if entry.platform == "cpu")
        processes = max(1, jax.local_device_count())
        flops, bandwidth = (speed / processes for speed in measure_cpu())
        return dataclasses.replace(
            cpu,
            memory=host_memory().total // per_host,
            flops_bf16=flops,
            flops_f32=flops,
            bandwidth=bandwidth,
            link=bandwidth,
        )
    stats = device.memory_stats() or {}
    memory = int(stats.get("bytes_limit", named.memory if named else 16 * 2**30))
    if named is not None:
        return dataclasses.replace(named, memory=memory)
    same_platform = (entry for entry in known if entry.platform == machine.platform)
    closest = min(same_platform, key=lambda entry: abs(entry.memory - memory))
    return dataclasses.replace(closest, name=str(device.device_kind), memory=memory)


@functools.cache
def measure_cpu() -> tuple[float, float]:
    """(float32 matrix-product operations per second, memory bytes per second) of all cores; takes about 0.1 s."""
    side = 768
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        a = jax.numpy.ones((side, side), "float32")
        product = jax.jit(lambda x: x @ x)
        product(a).block_until_ready()
        product_seconds = _fastest(lambda: product(a).block_until_ready())
    x = np.ones(4 * 2**20, np.float32)
    return 2 * side**3 / product_seconds, 2 * x.nbytes / _fastest(x.copy)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of ROUNDS calls."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
