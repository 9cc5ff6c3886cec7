"""After which update do all processes stop? One tiny collective operation an update gives every process one answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all processes know of one update: `signal` is the highest signal's number any received (0: none).

    `seconds[p]` is what process p said the update before took. Equal on every process, so whatever is decided by it
    is decided alike.
    """

    signal: int
    seconds: tuple[float, ...]

    @property
    def skew(self) -> float:
        """Seconds between the fastest and the slowest process."""
        return max(self.seconds) - min(self.seconds)


class StopFlag:
    """Passes each process's flag to all, beside the training step and not in it.

    `submit` is called after each update is dispatched, `agreed` when its metrics are read (an update later): it
    returns the answers in the order of submission. The device is never waited for in between. All processes must
    submit equally often. With one process nothing runs on a device.
    """

    several: bool  # whether there are other processes

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        devices = list(jax.devices() if devices is None else devices)
        self.several = len({device.process_index for device in devices}) > 1
        self._pending: list[jax.Array | np.ndarray] = []
        first = {device.process_index: number for number, device in reversed(list(enumerate(devices)))}
        self._rows = [first[process] for process in sorted(first)]
        if self.several:
            # All devices of the job, so that no other group of them has to be connected.
            mesh = Mesh(np.array(devices), ("device",))
            self._split = NamedSharding(mesh, PartitionSpec("device"))
            self._gather = jax.jit(lambda flags: flags, out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._local = sum(device.process_index == jax.process_index() for device in devices)
            self._shape = (len(devices), 2)

    def submit(self, signal: int | None, seconds: float = 0.0) -> None:
        """This process's answer for the update just dispatched: the signal it received, or None."""
        row = np.array([[signal or 0, seconds]], np.float32)
        if not self.several:
            self._pending.append(row)
            return
        rows = np.repeat(row, self._local, axis=0)
        self._pending.append(self._gather(jax.make_array_from_process_local_data(self._split, rows, self._shape)))

    def agreed(self) -> Agreed:
        """What all processes said for the oldest update not yet asked for."""
        flags = self._pending.pop(0)
        rows = np.asarray(flags.addressable_data(0) if isinstance(flags, jax.Array) else flags)
        rows = rows[self._rows] if self.several else rows
        return Agreed(int(rows[:, 0].max()), tuple(float(value) for value in rows[:, 1]))
