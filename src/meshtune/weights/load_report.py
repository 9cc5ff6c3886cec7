"""Measures loading on one process: host memory, bytes read, files, seconds, bytes on each device."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path

import jax

STATM = Path("/proc/self/statm")
INTERVAL = 0.01  # seconds between looks at the resident memory; reading it takes some 20 microseconds


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Of one process. Bytes and seconds; host memory is resident memory, 0 where the system has no /proc.

    `read` counts bytes of tensors that this process read from files, `placed` maps each local device to the bytes of
    parameters on it, `in_use` to what its allocator says is in use (absent on backends that do not say, such as CPU,
    where the arrays are host memory too).
    """

    process: int
    host_before: int
    host_peak: int
    host_after: int
    read: int
    files: int
    seconds: float
    placed: dict[str, int]
    in_use: dict[str, int]

    @property
    def line(self) -> str:
        """One line for a log."""
        host = " -> ".join(_mib(n) for n in (self.host_before, self.host_peak, self.host_after))
        on_devices = [_mib(self.in_use.get(name, placed)) for name, placed in self.placed.items()]
        devices = ", ".join(on_devices[:16]) + (", ..." if len(on_devices) > 16 else "")
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return (
            f"process {self.process}: {_mib(self.read)} MiB read from {files} in {self.seconds:.1f} s; "
            f"host memory {host} MiB (before, peak, after); on each device {devices} MiB"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.{0 if count >= 10 * 2**20 else 1}f}"


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemoryProbe:
    """Samples the resident memory while it is open: `before`, `peak`, `after`, `seconds`."""

    def __enter__(self) -> MemoryProbe:
        self._began = time.monotonic()
        self.before = self.peak = self.after = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if self.before:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.before:
            self._thread.join()
        self.after = resident()
        self.peak = max(self.peak, self.after)
        self.seconds = time.monotonic() - self._began

    def _look(self) -> None:
        while not self._done.wait(INTERVAL):
            self.peak = max(self.peak, resident())


def bytes_in_use(devices: list[jax.Device]) -> dict[str, int]:
    """Bytes in use on devices, of those whose allocator reports them."""
    stats = {_name(device): device.memory_stats() for device in devices}
    return {name: int(entry["bytes_in_use"]) for name, entry in stats.items() if entry and "bytes_in_use" in entry}


def bytes_placed(leaves: list[jax.Array]) -> dict[str, int]:
    """Bytes of some arrays on each local device."""
    placed: dict[str, int] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            name = _name(shard.device)
            placed[name] = placed.get(name, 0) + shard.data.nbytes
    return placed


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"
