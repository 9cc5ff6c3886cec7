"""The table of devices, as JAX sees them."""

from __future__ import annotations

import os
import platform

import jax
import psutil
from rich.table import Table

GIB = 2**30


def device_table() -> Table:
    """One row for each kind of device: how many, and the memory of each in GiB."""
    table = Table(title="devices", title_justify="left")
    for heading in ("backend", "device", "count", "memory each"):
        table.add_column(heading, justify="right" if heading == "count" else "left")
    kinds: dict[tuple[str, str, str], int] = {}
    for device in jax.devices():
        row = (device.platform, *_words(device))
        kinds[row] = kinds.get(row, 0) + 1
    for (backend, kind, memory), count in kinds.items():
        table.add_row(backend, kind, str(count), memory)
    return table


def _words(device: jax.Device) -> tuple[str, str]:
    if device.platform == "cpu":
        memory = psutil.virtual_memory()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return (
            f"{platform.machine()}, {cores} cores",
            f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free",
        )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return device.device_kind, f"{limit / GIB:.1f} GiB" if limit else "unknown"
