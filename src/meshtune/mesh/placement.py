"""Where whole trees of arrays lie: parameters, what an optimizer keeps of them, and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from meshtune.arrays.paths import named_leaves, path_name
from meshtune.mesh.layout import Layout

Tree = dict[str, Any]
HOST = "pinned_host"
WORTH = 2**14  # bytes of an array from which it may wait on the host
BATCH_AXES = ("whole", "batch", "length")  # of [A, B, T]; [B, T] leaves out the first
OF_TOKENS = frozenset(("tokens", "targets", "positions", "segment_ids", "weights", "nll"))  # the others: of documents


def batch_axes(name: str, dimensions: int = 3) -> tuple[str, ...]:
    """The logical axes of an array of a batch: its last one is positions, or the documents of a row."""
    axes = BATCH_AXES if name in OF_TOKENS else (*BATCH_AXES[:2], "whole")
    return axes[-dimensions:]


def shardings(abstract: Tree, layout: Layout) -> Tree:
    """A NamedSharding for every ArraySpec of a tree."""
    return jax.tree.map(layout.of, abstract)


def on_host(sharding: Sharding | None) -> NamedSharding:
    """The same split, in the host's memory; of None, one device. For ShapeDtypeStructs and shardings of results.

    A described device has no memories that could be named, and a sharding of one device alone does not tell its memory
    to a program that is traced with no array there: both are said of the mesh without its devices.
    """
    if not isinstance(sharding, NamedSharding):
        return NamedSharding(AbstractMesh((1,), ("one",)), PartitionSpec(), memory_kind=HOST)
    there = sharding.with_memory_kind(HOST)
    if there.memory_kind == HOST:
        return there
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def waiting(like: Any, *, stacked_only: bool = False) -> Any:
    """A tree of ShapeDtypeStructs with its arrays in the host's memory: all but those too small to be worth a message.

    `stacked_only` leaves out what is no layer's.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        small = not leaf.shape or math.prod(leaf.shape) * leaf.dtype.itemsize < WORTH
        if small or (stacked_only and not path_name(path).startswith("layers/")):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))

    return jax.tree_util.tree_map_with_path(one, like)


def names_on_host(like: Any) -> list[str]:
    """The paths of the arrays that lie in the host's memory."""
    return [name for name, leaf in named_leaves(like) if is_on_host(leaf.sharding)]


def is_on_host(sharding: Sharding | None) -> bool:
    return sharding is not None and sharding.memory_kind == HOST


def real(sharding: Sharding | None) -> Sharding | None:
    """Where an array is put that a ShapeDtypeStruct says lies there: on this process's device, where no mesh is.

    Of a mesh of one: a sharding of one device alone leaves its memory out of the array's type.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = Mesh(np.array(jax.local_devices()[:1]), sharding.mesh.axis_names)
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def moved(tree: Tree, like: Tree) -> Tree:
    """`tree` with what `like` has in the host's memory brought there, array by array; each is given up where it was."""

    def one(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        where = real(wanted.sharding)
        if where is None or not is_on_host(where) or is_on_host(leaf.sharding):
            return leaf
        there = jax.device_put(leaf, where).block_until_ready()
        leaf.delete()
        return there

    return jax.tree.map(one, tree, like)


def cast_there(array: jax.Array, dtype: str) -> jax.Array:
    """An array in the host's memory in another dtype, made there by the host itself."""
    parts = []
    for shard in array.addressable_shards:
        wide = np.asarray(shard.data).astype(dtype)
        parts.append(jax.device_put(wide, SingleDeviceSharding(shard.device, memory_kind=HOST)).block_until_ready())
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def place_batch(arrays: Mapping[str, np.ndarray], layout: Layout | None, order: np.ndarray | None = None) -> Any:
    """A batch's arrays, [A, B, T] or [B, T] and whole on every process, as global arrays split by rows and positions;
    those of the documents in a row are [A, B, S] or [B, S].

    Each process hands to its devices only the rows and positions they hold. `order` rearranges the positions of every
    row first (see kernels.attention.zigzag_order).
    """
    if layout is None:
        return dict(arrays)
    placed = {}
    for name, array in arrays.items():
        if order is not None and name in OF_TOKENS:
            array = array[..., order]
        sharding = layout.sharding(batch_axes(name, array.ndim), array.shape)
        placed[name] = jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index])
    return placed
