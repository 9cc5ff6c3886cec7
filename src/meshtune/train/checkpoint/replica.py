"""Restores a checkpoint that the processes of one replica under dp read, and broadcast to the others."""

from __future__ import annotations

import math
import pathlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from meshtune.arrays.tree import Leaves
from meshtune.mesh.processes import Job, raise_collectively
from meshtune.weights.tensor_reader import (
    BLOCK_BYTES,
    BroadcastReader,
    aligned_empty,
    broadcast_reader,
    replica_groups,
)

Index = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def replica_mesh(target: Leaves) -> Mesh | None:
    """The mesh of abstract arrays that one replica can read for the others: None where there is a single replica, an
    array is split over dp, or the devices of a replica are not those of whole processes."""
    shardings = [leaf.sharding for leaf in target.values()]
    if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        return None
    mesh = shardings[0].mesh
    if any(sharding.mesh != mesh or _splits_over_dp(sharding) for sharding in shardings):
        return None
    groups = _groups_by_reader(mesh)
    return None if groups is None or all(len(group) == 1 for group in groups) else mesh


def restore_by_replica(state: pathlib.Path, target: Leaves, mesh: Mesh, job: Job) -> Leaves:
    """The arrays in the folder `state` of a checkpoint, placed as the abstract ones of `target`, on all processes.

    Bits are moved unchanged. Host memory: a shard. Raises what reading them raises, on all processes.
    """
    groups = _groups_by_reader(mesh)
    assert groups is not None
    reader, _ = broadcast_reader([*np.asarray(mesh.devices).flat], groups)
    arrays: Leaves = {}
    with raise_collectively(job, f"checkpoints: replica of {state.parent.name}"):
        if reader is None or reader.reads:
            arrays = _read(state, target, mesh, {group[0] for group in groups})
    restored: Leaves = {}
    for name in sorted(target):
        shards = {_index(shard.index, leaf.shape): shard.data for leaf in [arrays.pop(name, None)] if leaf is not None
                  for shard in leaf.addressable_shards}  # fmt: skip
        restored[name] = _place(target[name], shards, reader)
    return restored


def _splits_over_dp(sharding: NamedSharding) -> bool:
    return any("dp" in (axes if isinstance(axes, tuple) else (axes,)) for axes in sharding.spec)


def _groups_by_reader(mesh: Mesh) -> list[list[int]] | None:
    """Groups of processes that hold the same shards, the one with those of the first replica at the head of each; None
    where that one does not have them all."""
    axis = mesh.axis_names.index("dp")
    places: dict[int, set[tuple[int, ...]]] = {}
    first: dict[int, set[tuple[int, ...]]] = {}
    for index, device in np.ndenumerate(np.asarray(mesh.devices)):
        place = index[:axis] + index[axis + 1 :]
        places.setdefault(device.process_index, set()).add(place)
        if index[axis] == 0:
            first.setdefault(device.process_index, set()).add(place)
    groups = []
    for group in replica_groups(mesh):
        readers = [process for process in group if first.get(process) == places[process]]
        if not readers:
            return None
        groups.append([readers[0], *(process for process in group if process != readers[0])])
    return groups


def _read(state: pathlib.Path, target: Leaves, mesh: Mesh, readers: set[int]) -> Leaves:
    """Reads the arrays onto the devices of the first replica; its processes call this."""
    import orbax.checkpoint as ocp

    devices = np.take(np.asarray(mesh.devices), [0], axis=mesh.axis_names.index("dp"))
    replica = Mesh(devices, mesh.axis_names)
    items = {
        name: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(replica, leaf.sharding.spec, memory_kind=leaf.sharding.memory_kind),
        )
        for name, leaf in target.items()
    }
    options = ocp.options.MultiprocessingOptions(
        primary_host=min(readers), active_processes=readers, barrier_sync_key_prefix="replica"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    reader = ocp.Checkpointer(handler, multiprocessing_options=options)
    return reader.restore(
        state,
        ocp.args.PyTreeRestore(
            items,
            restore_args=ocp.checkpoint_utils.construct_restore_args(items),
            partial_restore=True,
        ),
    )


def _place(target: jax.ShapeDtypeStruct, shards: dict[Index, jax.Array], reader: BroadcastReader | None) -> jax.Array:
    """An array of which the reader has `shards`, and the other processes of its group none."""
    places = target.sharding.addressable_devices_indices_map(target.shape)
    indices = {device: _index(index, target.shape) for device, index in places.items()}
    blocks: dict[Index, jax.Array | np.ndarray] = dict(shards)
    for index in sorted(set(indices.values())):
        if reader is not None:
            block = _broadcast(reader, shards.get(index), index, np.dtype(target.dtype))
            blocks.setdefault(index, block)
    on_devices = [
        jax.device_put(blocks[index], SingleDeviceSharding(device, memory_kind=target.sharding.memory_kind))
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, on_devices)


def _broadcast(reader: BroadcastReader, shard: jax.Array | None, index: Index, dtype: np.dtype) -> np.ndarray:
    shape = tuple(stop - start for start, stop in index)
    size = math.prod(shape) * dtype.itemsize
    block = aligned_empty(shape, dtype) if shard is None else np.ascontiguousarray(shard)
    content = block.reshape(-1).view(np.uint8)
    for start in range(0, size, BLOCK_BYTES):
        part = content[start : start + BLOCK_BYTES]
        received = reader.broadcast(part if reader.reads else None, part.size)
        if not reader.reads:
            part[...] = received
    return block


def _index(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    index = (slice(None),) * len(shape) if index is None else index
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)
