"""Decides whether an adapter is merged into a copy of the weights that it adapts, or computed separately."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from meshtune.adapters.merge import merge_adapters
from meshtune.arrays.tree import Tree, flatten, layer_site, unflatten
from meshtune.errors import UserError
from meshtune.mesh.processes import Job
from meshtune.quantize.weight import QuantisedWeight

if TYPE_CHECKING:
    from meshtune.adapters.peft_format import LoadedAdapter

SHARE = 0.5  # of the memory that the base leaves free, which merged weights may take: caches need room as well


@dataclasses.dataclass(frozen=True)
class Merging:
    """The choice, with its reason."""

    merges: bool
    reason: str

    def __str__(self) -> str:
        return f"{'merged' if self.merges else 'not merged'} ({self.reason})"


def plan_merging(choice: bool | None, adapters: Mapping[str, LoadedAdapter], params: Tree, job: Job) -> Merging | None:
    """Whether the one of `adapters` is merged into a copy of its weights of the base `params`; None without adapters.

    `choice` None merges where nothing is against it and the copy takes at most half of the memory that is free.
    Raises UserError where merging is asked for and impossible.
    """
    obstacle = _obstacle(adapters, params)
    if choice and obstacle is not None:
        raise UserError(f"no adapter can be merged: {obstacle}", where="--merge", fix="leave --merge out")
    if not adapters:
        return None
    if obstacle is not None or choice is not None:
        return Merging(bool(choice), obstacle or "asked for")
    ((_, adapter),) = adapters.items()
    size, free = _copied_bytes(adapter, params), min(job.exchange("free memory", _free_bytes()))
    sizes = (
        f"a second copy of the weights it adapts takes {size / 2**30:.2g} GiB of {free / 2**30:.3g} GiB that are free"
    )
    return Merging(size <= SHARE * free, sizes)


def _obstacle(adapters: Mapping[str, LoadedAdapter], params: Tree) -> str | None:
    """Why adapters cannot be merged, or should not; None if they can."""
    if len(adapters) != 1:
        return f"there are {len(adapters)} of them" if adapters else "there is none"
    if any(isinstance(leaf, QuantisedWeight) for leaf in flatten(params).values()):
        return "the base is quantised"
    ((_, adapter),) = adapters.items()
    if adapter.spec.tied and "head/adapter" in flatten(adapter.trainable):
        return "it adapts a head that is tied to the embedding"
    return None


def merged_copy(params: Tree) -> Tree:
    """Parameters with their adapters merged; weights that they adapt are copied first, and others are shared."""
    flat = flatten(params)
    for path in [path for path in flat if path.endswith("/adapter")]:
        weight = f"{path.removesuffix('/adapter')}/weight"
        flat[weight] = jnp.copy(flat[weight])
    return merge_adapters(unflatten(flat))


def _copied_bytes(adapter: LoadedAdapter, params: Tree) -> int:
    """Bytes on each device of the weights that an adapter adapts, however its layers are stacked: of all layers."""
    sites = {layer_site(path.rpartition("/")[0]) for path in flatten(adapter.trainable)}
    leaves = {path: leaf for path, leaf in flatten(params).items() if path.endswith("/weight")}
    adapted = [leaf for path, leaf in leaves.items() if layer_site(path.removesuffix("/weight")) in sites]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in adapted)


def _free_bytes() -> int:
    """Memory of this process's first device that nothing holds."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
