"""The table of devices of the whole job, and the check that they are what the mesh needs."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence

import jax
import psutil
from rich.table import Table

from meshtune.errors import UserError
from meshtune.mesh.processes import Job

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one process sees: `count` local devices of one `kind` with `memory` each, on `host`."""

    process: int
    host: str
    platform: str
    kind: str
    count: int
    memory: str


def seen_here(process: int = 0, host: str = "") -> Seen:
    """The devices of this process."""
    local = jax.local_devices()
    kind, memory = _words(local[0])
    return Seen(process, host or platform.node(), local[0].platform, kind, len(local), memory)


def seen_by_all(job: Job) -> list[Seen]:
    """What every process of the job sees, in order of process; every process calls it."""
    mine = dataclasses.asdict(seen_here(job.process_index, job.host))
    return [Seen(**fields) for fields in job.exchange("devices", mine)]


def device_table(seen: Sequence[Seen] | None = None) -> Table:
    """One row for each host and kind of device, with the processes there; of this process alone unless given."""
    seen = seen or [seen_here()]
    several = len(seen) > 1
    table = Table(title="devices", title_justify="left")
    for heading in (*(["host", "processes"] if several else []), "backend", "device", "count", "memory each"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    rows: dict[tuple[str, str, str], list[Seen]] = {}
    for one in seen:
        rows.setdefault((one.host, one.platform, one.kind), []).append(one)
    for (host, backend, kind), here in rows.items():
        count = sum(one.count for one in here)
        where = [host, _ranges([one.process for one in here])] if several else []
        table.add_row(*where, backend, kind, str(count), here[0].memory)
    if several:
        table.caption = f"{sum(one.count for one in seen)} devices, {len(seen)} processes, {len(hosts(seen))} host(s)"
    return table


def hosts(seen: Sequence[Seen]) -> list[str]:
    """The names of the hosts, in order of process."""
    return list(dict.fromkeys(one.host for one in seen))


def check_devices(seen: Sequence[Seen], expected: int, *, mesh: str, launcher: str = "none") -> None:
    """Raises UserError, naming every process with what it sees, if the job has not `expected` devices.

    `mesh` is the mesh in words; `launcher` as mesh.rendezvous.ProcessInfo says it, for the advice.
    """
    found = sum(one.count for one in seen)
    if found == expected:
        return
    kinds = {(one.platform, one.kind) for one in seen}
    named = [f"process {one.process} on {one.host}: {one.count} x {one.kind}" for one in seen[:16]]
    more = [f"and {len(seen) - 16} more processes"] if len(seen) > 16 else []
    raise UserError(
        f"the mesh {mesh} needs {expected} devices, and the job has {found}"
        + (f", of {len(kinds)} kinds" if len(kinds) > 1 else ""),
        where="; ".join([*named, *more]),
        fix=_advice(seen, expected, found, launcher),
    )


def _advice(seen: Sequence[Seen], expected: int, found: int, launcher: str) -> str:
    other = f"or give a mesh whose axes multiply to {found}"
    each = expected // len(seen)
    if found < expected and launcher == "Slurm" and seen[0].platform != "cpu":
        if all(one.count == 1 for one in seen):
            per_node = max(1, expected // len(hosts(seen)))
            return (
                "every process sees one GPU, as with --gpus-per-task=1, --gpu-bind or --gpus-per-node=1: ask sbatch "
                f"for --gpus-per-node={per_node} --ntasks-per-node=1 and none of those, {other}"
            )
        return f"ask sbatch for more: --nodes, or --gpus-per-node={expected // len(hosts(seen))}; {other}"
    if seen[0].platform == "cpu":
        return f"simulate {each} devices a process (meshtune launch local --devices {each}), {other}"
    if found > expected:
        return f"show the processes fewer devices (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES), {other}"
    return f"check what each process is shown (nvidia-smi or rocm-smi, CUDA_VISIBLE_DEVICES), {other}"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _words(device: jax.Device) -> tuple[str, str]:
    if device.platform == "cpu":
        memory = psutil.virtual_memory()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        simulated = ", simulated" if jax.local_device_count() > 1 else ""
        return (
            f"{platform.machine()}, {cores} cores{simulated}",
            f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free",
        )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return device.device_kind, f"{limit / GIB:.1f} GiB" if limit else "unknown"
