"""Memory in use, from the device's allocator where it tells, else of this process."""

from __future__ import annotations

import math

import jax
import psutil
from jaxtyping import PyTree


def memory_in_use() -> int:
    """Bytes in use on the first local device; on backends without figures (CPU), resident bytes of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_in_use" in stats:
        return int(stats["bytes_in_use"])
    return int(psutil.Process().memory_info().rss)


def bytes_on_each(tree: PyTree, itemsize: int | None = None) -> int:
    """Bytes of a tree's arrays on one device; with `itemsize`, as if every number took so many."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * (itemsize or leaf.dtype.itemsize) for leaf in leaves)


def size_in_words(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
