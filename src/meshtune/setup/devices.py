"""Lists the devices of all processes of a job, and checks their number against the mesh."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence

import jax
from rich.table import Table

from meshtune.errors import UserError
from meshtune.mesh.processes import Job
from meshtune.setup.shortage import host_memory

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class ProcessDevices:
    """The devices of one process: `count` local ones of one `kind` with `memory` each, on `host`."""

    index: int
    host: str
    platform: str
    kind: str
    count: int
    memory: str


def local_devices(index: int = 0, host: str = "") -> ProcessDevices:
    """Describes the devices of this process."""
    local = jax.local_devices()
    kind, memory = _describe(local[0])
    return ProcessDevices(index, host or platform.node(), local[0].platform, kind, len(local), memory)


def gather_devices(job: Job) -> list[ProcessDevices]:
    """Exchanges device descriptions between all processes of the job; returns them in order of process."""
    local = dataclasses.asdict(local_devices(job.process_index, job.host))
    return [ProcessDevices(**fields) for fields in job.exchange("devices", local)]


def device_table(processes: Sequence[ProcessDevices] | None = None) -> Table:
    """Renders a table with a row per host and kind of device. Defaults to the devices of this process."""
    processes = processes or [local_devices()]
    several = len(processes) > 1
    table = Table(title="devices", title_justify="left")
    for heading in (*(["host", "processes"] if several else []), "backend", "device", "count", "memory each"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    rows: dict[tuple[str, str, str], list[ProcessDevices]] = {}
    for process in processes:
        rows.setdefault((process.host, process.platform, process.kind), []).append(process)
    for (host, backend, kind), group in rows.items():
        count = sum(process.count for process in group)
        where = [host, _ranges([process.index for process in group])] if several else []
        table.add_row(*where, backend, kind, str(count), group[0].memory)
    if several:
        devices = sum(process.count for process in processes)
        table.caption = f"{devices} devices, {len(processes)} processes, {len(hosts(processes))} host(s)"
    return table


def hosts(processes: Sequence[ProcessDevices]) -> list[str]:
    """Returns the distinct host names, in order of process."""
    return list(dict.fromkeys(process.host for process in processes))


def check_devices(processes: Sequence[ProcessDevices], expected: int, *, mesh: str, launcher: str = "none") -> None:
    """Raises UserError, listing the devices of every process, if the job does not have `expected` devices.

    `mesh` is the text of the mesh and `launcher` that of mesh.rendezvous.ProcessInfo; both are for the message.
    """
    count = sum(process.count for process in processes)
    if count == expected:
        return
    kinds = {(process.platform, process.kind) for process in processes}
    named = [
        f"process {process.index} on {process.host}: {process.count} x {process.kind}" for process in processes[:16]
    ]
    unnamed = [f"and {len(processes) - 16} more processes"] if len(processes) > 16 else []
    raise UserError(
        f"the mesh {mesh} needs {expected} devices, and the job has {count}"
        + (f", of {len(kinds)} kinds" if len(kinds) > 1 else ""),
        where="; ".join([*named, *unnamed]),
        fix=_advice(processes, expected, count, launcher),
    )


def _advice(processes: Sequence[ProcessDevices], expected: int, count: int, launcher: str) -> str:
    alternative = f"or give a mesh whose axes multiply to {count}"
    per_process = expected // len(processes)
    if count < expected and launcher == "Slurm" and processes[0].platform != "cpu":
        if all(process.count == 1 for process in processes):
            per_node = max(1, expected // len(hosts(processes)))
            return (
                "every process sees one GPU, as with --gpus-per-task=1, --gpu-bind or --gpus-per-node=1: ask sbatch "
                f"for --gpus-per-node={per_node} --ntasks-per-node=1 and none of those, {alternative}"
            )
        return f"ask sbatch for more: --nodes, or --gpus-per-node={expected // len(hosts(processes))}; {alternative}"
    if processes[0].platform == "cpu":
        return (
            f"simulate {per_process} devices a process (meshtune launch local --devices {per_process}), {alternative}"
        )
    if count > expected:
        return f"show the processes fewer devices (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES), {alternative}"
    return f"check what each process is shown (nvidia-smi or rocm-smi, CUDA_VISIBLE_DEVICES), {alternative}"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _describe(device: jax.Device) -> tuple[str, str]:
    if device.platform == "cpu":
        memory = host_memory()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        simulated = ", simulated" if jax.local_device_count() > 1 else ""
        return (
            f"{platform.machine()}, {cores} cores{simulated}",
            f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} free",
        )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return device.device_kind, f"{limit / GIB:.1f} GiB" if limit else "unknown"
