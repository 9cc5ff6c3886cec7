"""Memory in use and memory that is free, from the device's allocator where it tells, else of this process and host."""

from __future__ import annotations

import dataclasses
import math

import jax
import psutil
from jaxtyping import PyTree

from meshtune.mesh.processes import Job
from meshtune.setup.shortage import host_memory, size_in_words

__all__ = ["FreeMemory", "bytes_on_each", "free_memory", "memory_in_use", "memory_kind", "size_in_words"]


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """Bytes that are free on the fullest device of a job, and of host memory for each device. `shared`: a device has no
    memory but the host's."""

    device: int
    host: int
    shared: bool


def free_memory(job: Job, devices_per_host: int) -> FreeMemory:
    """The memory that is free now. All processes of `job` call this, and get the same."""
    devices = [device.memory_stats() or {} for device in jax.local_devices()]
    host = host_memory().available // max(1, devices_per_host)
    shared = jax.local_devices()[0].platform == "cpu"
    free = [stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in devices if "bytes_limit" in stats]
    # A device whose allocator tells nothing is not checked.
    local = host if shared else min(free, default=1 << 60)
    local, host = job.minimum("free memory", [local, host])
    return FreeMemory(local, host, shared)


def memory_in_use() -> int:
    """Bytes in use on the first local device; on backends without figures (CPU), resident bytes of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_in_use" in stats:
        return int(stats["bytes_in_use"])
    return int(psutil.Process().memory_info().rss)


def memory_kind() -> str:
    """Returns which memory `memory_in_use` counts: device, or host if the devices report nothing."""
    return "device" if "bytes_in_use" in (jax.local_devices()[0].memory_stats() or {}) else "host"


def bytes_on_each(tree: PyTree, itemsize: int | None = None) -> int:
    """Returns the bytes of a tree's arrays on one device; `itemsize` overrides the bytes of each number."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * (itemsize or leaf.dtype.itemsize) for leaf in leaves)
