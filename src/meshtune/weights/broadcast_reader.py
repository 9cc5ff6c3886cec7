"""One process of a group reads files and broadcasts what it read to the others: for slow shared storage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SMALLEST = 4096  # blocks are padded to powers of two, so that there are few programs


class BroadcastReader:
    """Broadcasts bytes from the first process of a group to all of them. Every transfer is collective: all processes
    of the group must make the same calls in the same order.

    A transfer is a sum over the group, to which all but the reader contribute zeros, on one device of each process.
    Host and device memory: two blocks.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._device = next(device for device in devices if device.process_index == jax.process_index())
        self.reads = self._device == devices[0]
        self._members = len(devices)
        mesh = Mesh(np.array(devices), ("process",))
        self._rows = NamedSharding(mesh, PartitionSpec("process"))
        self._sum = jax.jit(
            lambda x: jnp.sum(x, 0, dtype=jnp.uint32), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def broadcast(self, block: np.ndarray | None, size: int) -> np.ndarray:
        """The reader's block of `size` bytes, as uint8, on every process; the others pass None."""
        assert (block is not None) == self.reads
        length = max(SMALLEST, 1 << (size - 1).bit_length()) // 4
        local = np.zeros((1, length), np.uint32)
        if block is not None:
            local.view(np.uint8)[0, :size] = block.reshape(-1).view(np.uint8)
        shape = (self._members, length)
        rows = jax.make_array_from_single_device_arrays(shape, self._rows, [jax.device_put(local, self._device)])
        del local
        (shard,) = self._sum(rows).addressable_shards
        return np.asarray(shard.data).view(np.uint8)[:size]

    def broadcast_json(self, value: object) -> Any:
        """A JSON value of the reader, on every process; the others pass None."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8) if self.reads else None
        length = None if text is None else np.array([text.size], np.int64)
        size = int(self.broadcast(length, 8).view(np.int64)[0])
        return json.loads(self.broadcast(text, size).tobytes())


def broadcast_reader(
    devices: Sequence[jax.Device], processes: int | None = None
) -> tuple[BroadcastReader | None, list[jax.Device]]:
    """(the reader of this process's group, all devices of the group).

    `devices` are those of the job; a group is `processes` neighbouring processes (None: all). The reader is None where
    a process is a group by itself.
    """
    ranks = sorted({device.process_index for device in devices})
    rank, size = ranks.index(jax.process_index()), processes or len(ranks)
    group = ranks[rank // size * size :][:size]
    first = [next(device for device in devices if device.process_index == number) for number in group]
    reader = BroadcastReader(first) if len(group) > 1 else None
    return reader, [device for device in devices if device.process_index in group]
