"""One process of a group reads, and its blocks reach the others over the devices' network: for slow shared storage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SMALLEST = 4096  # blocks are filled up to powers of two, so that there are few programs


class Relay:
    """Bytes from the first process of a group to all of them. All must call alike: every transfer is collective.

    A transfer is a sum over the group, to which all but the reader bring zeros, on one device of each process. Host
    and device memory: two blocks.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._device = next(device for device in devices if device.process_index == jax.process_index())
        self.reads = self._device == devices[0]
        self._members = len(devices)
        mesh = Mesh(np.array(devices), ("process",))
        self._rows = NamedSharding(mesh, PartitionSpec("process"))
        self._sum: Any = jax.jit(
            lambda x: jnp.sum(x, 0, dtype=jnp.uint32), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def pass_on(self, block: np.ndarray | None, size: int) -> np.ndarray:
        """The reader's block of `size` bytes, as uint8, on every process; the others give None."""
        assert (block is not None) == self.reads
        words = max(SMALLEST, 1 << (size - 1).bit_length()) // 4
        mine = np.zeros((1, words), np.uint32)
        if block is not None:
            mine.view(np.uint8)[0, :size] = block.reshape(-1).view(np.uint8)
        shape = (self._members, words)
        given = jax.make_array_from_single_device_arrays(shape, self._rows, [jax.device_put(mine, self._device)])
        del mine
        (shard,) = self._sum(given).addressable_shards
        return np.asarray(shard.data).view(np.uint8)[:size]

    def tell(self, what: Any) -> Any:
        """Something that JSON can hold, of the reader, on every process; the others give None."""
        words = np.frombuffer(json.dumps(what).encode(), np.uint8) if self.reads else None
        length = None if words is None else np.array([words.size], np.int64)
        size = int(self.pass_on(length, 8).view(np.int64)[0])
        return json.loads(self.pass_on(words, size).tobytes())


def relay(devices: Sequence[jax.Device], processes: int | None = None) -> tuple[Relay | None, list[jax.Device]]:
    """(the relay of this process's group, all devices of the group).

    `devices` are those of the job; a group is `processes` neighbouring processes (None: all). The relay is None where
    a process is a group of its own.
    """
    numbers = sorted({device.process_index for device in devices})
    place, size = numbers.index(jax.process_index()), processes or len(numbers)
    group = numbers[place // size * size :][:size]
    first = [next(device for device in devices if device.process_index == number) for number in group]
    return (Relay(first) if len(group) > 1 else None), [d for d in devices if d.process_index in group]
