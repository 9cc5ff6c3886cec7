"""Shardings and host offloading of whole trees of arrays (parameters, optimizer state), and placement of batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from meshtune.arrays.batch import batch_axes
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, named_leaves
from meshtune.mesh.layout import Layout

HOST = "pinned_host"  # JAX's memory kind
MIN_OFFLOAD_BYTES = 2**14  # smaller arrays stay on the device: a transfer costs more than their memory


def shardings(abstract: Tree, layout: Layout) -> Tree:
    """The NamedSharding of every ArraySpec of a tree."""
    return jax.tree.map(layout.of, abstract)


def host_sharding(sharding: Sharding | None) -> NamedSharding:
    """The same sharding in the host's memory (None is a single device), for ShapeDtypeStructs and out_shardings.

    Devices of a described target have no memory kinds, and a program that is traced without arrays does not learn the
    memory kind of a SingleDeviceSharding; both cases use an abstract mesh.
    """
    if not isinstance(sharding, NamedSharding):
        return NamedSharding(AbstractMesh((1,), ("single",), (AxisType.Auto,)), PartitionSpec(), memory_kind=HOST)
    on_host = sharding.with_memory_kind(HOST)
    if on_host.memory_kind == HOST:
        return on_host
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def offload_abstract(tree: PyTree) -> PyTree:
    """A tree of ShapeDtypeStructs with arrays of at least MIN_OFFLOAD_BYTES in the host's memory."""

    def offload(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.shape or math.prod(leaf.shape) * leaf.dtype.itemsize < MIN_OFFLOAD_BYTES:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host_sharding(leaf.sharding))

    return jax.tree.map(offload, tree)


def offload_frozen(tree: PyTree, specs: PyTree, offload: Collection[str]) -> PyTree:
    """offload_abstract of frozen arrays, as `offload` names them: those of layers ("weights") and "tables". `specs` are
    the tree's ArraySpecs."""

    def waits(spec: ArraySpec) -> bool:
        return ("weights" in offload and spec.is_stacked) or ("tables" in offload and is_table(spec))

    return jax.tree.map(lambda leaf, spec: offload_abstract(leaf) if waits(spec) else leaf, tree, specs)


def is_table(array: ArraySpec) -> bool:
    """Whether an array is an embedding or an output head."""
    return array.role in ("table", "head")


def offloaded_names(tree: PyTree) -> list[str]:
    """The paths of the arrays in the host's memory."""
    return [name for name, leaf in named_leaves(tree) if is_offloaded(leaf.sharding)]


def is_offloaded(sharding: Sharding | None) -> bool:
    return sharding is not None and sharding.memory_kind == HOST


def concrete_sharding(sharding: Sharding | None) -> Sharding | None:
    """The concrete sharding for that of a ShapeDtypeStruct: an abstract mesh becomes this process's first device.

    It remains a NamedSharding, because a SingleDeviceSharding does not put its memory kind into an array's type.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = Mesh(np.array(jax.local_devices()[:1]), sharding.mesh.axis_names)
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def offload_arrays(tree: Tree, like: Tree) -> Tree:
    """Moves the arrays of `tree` that `like` has in the host's memory there, one by one, and deletes the originals."""

    def offload(leaf: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = concrete_sharding(target.sharding)
        if sharding is None or not is_offloaded(sharding) or is_offloaded(leaf.sharding):
            return leaf
        moved = jax.device_put(leaf, sharding).block_until_ready()
        leaf.delete()
        return moved

    return jax.tree.map(offload, tree, like)


def cast_offloaded(array: jax.Array, dtype: str) -> jax.Array:
    """An array in the host's memory converted to another dtype by the host."""
    shards = []
    for shard in array.addressable_shards:
        converted = np.asarray(shard.data).astype(dtype)
        sharding = SingleDeviceSharding(shard.device, memory_kind=HOST)
        shards.append(jax.device_put(converted, sharding).block_until_ready())
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def place_batch(arrays: Mapping[str, np.ndarray], layout: Layout | None, order: np.ndarray | None = None) -> Tree:
    """The arrays of a batch as global arrays, sharded by rows and positions.

    `arrays` have the axes that arrays.batch lists, after one of micro-batches or without it. They have the shapes of
    the whole batch on every process, which transfers to its devices only their rows (see `local_rows`) and positions.
    `order` permutes the positions of every row first (see kernels.attention.zigzag_order).
    """
    if layout is None:
        return dict(arrays)
    placed = {}
    for name, array in arrays.items():
        axes = batch_axes(name, array.ndim)
        if order is not None and "length" in axes:
            array = np.take(array, order, axes.index("length"))
        sharding = layout.sharding(axes, array.shape)
        placed[name] = jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index])
    return placed


def local_rows(layout: Layout, rows: int, accumulation: int) -> tuple[list[int], list[int]]:
    """Of the `rows` of an update, in `accumulation` micro-batches, those on devices of this process; and those of them
    that are on no process with a lower index."""
    shape = (accumulation, rows // accumulation)
    table, lowest = np.arange(rows).reshape(shape), np.full(rows, np.iinfo(np.int64).max)
    is_local = np.zeros(rows, bool)
    for device, index in layout.sharding(("whole", "batch"), shape).devices_indices_map(shape).items():
        held = table[index].ravel()
        lowest[held] = np.minimum(lowest[held], device.process_index)
        is_local[held] |= device.process_index == jax.process_index()
    return np.flatnonzero(is_local).tolist(), np.flatnonzero(lowest == jax.process_index()).tolist()
