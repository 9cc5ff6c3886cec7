"""Decides after which update all processes stop: one tiny collective per update gives every process the same answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class StopDecision:
    """The facts about one update that all processes share.

    `signal` is the highest signal number that any process received (0: none). `seconds[p]` is the time that process p
    reported for the update before.
    """

    signal: int
    seconds: tuple[float, ...]

    @property
    def skew(self) -> float:
        """Seconds between the fastest and the slowest process."""
        return max(self.seconds) - min(self.seconds)


class StopFlag:
    """All-gathers each process's signal and step time, outside the training step.

    `submit` is called after each update is dispatched, and `decision` when that update's metrics are read (one update
    later): decisions come in the order of submission, and the device is never waited for in between. All processes
    must submit equally often. With one process nothing runs on a device.
    """

    multi_process: bool

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        devices = list(jax.devices() if devices is None else devices)
        self.multi_process = len({device.process_index for device in devices}) > 1
        self._pending: list[jax.Array | np.ndarray] = []
        first_device = {device.process_index: index for index, device in reversed(list(enumerate(devices)))}
        self._rows = [first_device[process] for process in sorted(first_device)]
        if self.multi_process:
            # Over all devices of the job, because no other communicator than theirs exists already.
            mesh = Mesh(np.array(devices), ("device",))
            self._sharded = NamedSharding(mesh, PartitionSpec("device"))
            self._gather = jax.jit(lambda flags: flags, out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._local_devices = sum(device.process_index == jax.process_index() for device in devices)
            self._shape = (len(devices), 2)

    def submit(self, signal: int | None, seconds: float = 0.0) -> None:
        """Submits the signal that this process received, if any, and its step time for the update just dispatched."""
        row = np.array([[signal or 0, seconds]], np.float32)
        if not self.multi_process:
            self._pending.append(row)
            return
        rows = np.repeat(row, self._local_devices, axis=0)
        self._pending.append(self._gather(jax.make_array_from_process_local_data(self._sharded, rows, self._shape)))

    def decision(self) -> StopDecision:
        """The decision for the oldest update whose decision was not yet read."""
        flags = self._pending.pop(0)
        rows = np.asarray(flags.addressable_data(0) if isinstance(flags, jax.Array) else flags)
        rows = rows[self._rows] if self.multi_process else rows
        return StopDecision(int(rows[:, 0].max()), tuple(float(value) for value in rows[:, 1]))
