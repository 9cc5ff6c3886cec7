"""The devices of a job: what a program is compiled for, their speeds and memory, and their number against the mesh."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.table import Table

from meshtune.costs.hardware import Device, Target, find_device, known_devices
from meshtune.errors import UserError
from meshtune.mesh.layout import count_slices
from meshtune.mesh.processes import Job
from meshtune.setup.shortage import host_memory


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a job as JAX lists them, on all of its processes.

    `platform` is one of costs.hardware.PLATFORMS. `chip` is the architecture of the devices; if empty, kernels query
    them.
    """

    platform: str
    devices: Sequence[jax.Device]
    chip: str = ""


def this_machine() -> Machine:
    """Returns the machine of the running job."""
    return Machine(platform_here(), tuple(jax.devices()))


def platform_here() -> str:
    """Returns the platform of JAX's default backend as costs.hardware.PLATFORMS names it; JAX calls both cuda and rocm
    gpu, and the plugins for Apple's and Intel's GPUs have names of their own."""
    return platform_named(jax.default_backend(), jax.devices()[0].client.platform_version)


# The names that plugins give to JAX: jax-mps and metaljax; jax-oneapi-plugin and its forerunner.
PLUGIN_PLATFORMS = {"mps": "metal", "metal": "metal", "oneapi": "oneapi", "sycl": "oneapi", "xpu": "oneapi"}


def platform_named(backend: str, version: str) -> str:
    """The platform of a backend by its name and its client's `platform_version`; another plugin's name as it is."""
    name = backend.lower()
    if name == "gpu":
        name = next((known for known in ("rocm", "oneapi", "sycl") if known in version.lower()), "cuda")
    return PLUGIN_PLATFORMS.get(name, name)


def attached_device() -> Device:
    """The first accelerator of this machine as JAX sees it; one that JAX does not see, by the name its driver has."""
    machine = this_machine()
    if machine.platform == "cpu" and (name := unseen_gpu()):
        device = find_device(name, known_devices())
        if device is not None:
            return device
    return local_device(machine)


def unseen_gpu() -> str:
    """The name of a GPU that its driver lists, empty without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        ran = None
    if ran is not None and ran.returncode == 0 and ran.stdout.strip():
        return ran.stdout.splitlines()[0].strip()
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return mac_name()
    return ""


def mac_name() -> str:
    """The name of a Mac's chip with its memory in GB, such as "M4 Pro-24"."""
    brand, size = (
        subprocess.run(["sysctl", "-n", key], capture_output=True, text=True).stdout.strip()
        for key in ("machdep.cpu.brand_string", "hw.memsize")
    )
    return f"{brand.removeprefix('Apple ')}-{round(int(size or 0) / 2**30)}"


ROUNDS = 4  # of each measurement; the fastest counts


def local_target(machine: Machine, hosts: int = 1) -> Target:
    """The devices of this job, spread evenly over `hosts`, as a target."""
    per_host = max(1, len(machine.devices) // hosts)
    return Target(hosts, per_host, local_device(machine, per_host), count_slices(machine.devices))


def local_device(machine: Machine, per_host: int = 1) -> Device:
    """The device type of this machine as hardware.toml describes it, with the memory that the device reports;
    a CPU's is the host's, shared by the `per_host` devices that it simulates.

    CPUs are measured. An unknown device type gets the speeds of the known one of its platform with the closest memory:
    ranking candidates needs only the ratios of the speeds.
    """
    device = machine.devices[0]
    known = list(known_devices().values())
    named = next((entry for entry in known if entry.kind.lower() == str(device.device_kind).lower()), None)
    if machine.platform == "cpu":
        cpu = next(entry for entry in known if entry.platform == "cpu")
        processes = max(1, jax.local_device_count())
        flops, bandwidth = (speed / processes for speed in measure_cpu())
        return dataclasses.replace(
            cpu,
            memory=host_memory().total // per_host,
            flops_bf16=flops,
            flops_f32=flops,
            bandwidth=bandwidth,
            link=bandwidth,
        )
    stats = device.memory_stats() or {}
    memory = int(stats.get("bytes_limit", named.memory if named else 16 * 2**30))
    if named is not None:
        return dataclasses.replace(named, memory=memory)
    same_platform = [entry for entry in known if entry.platform == machine.platform]
    closest = min(same_platform or known, key=lambda entry: abs(entry.memory - memory))
    return dataclasses.replace(closest, name=str(device.device_kind), memory=memory)


@functools.cache
def measure_cpu() -> tuple[float, float]:
    """(float32 matrix-product operations per second, memory bytes per second) of all cores; takes about 0.1 s."""
    side = 768
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        a = jax.numpy.ones((side, side), "float32")
        product = jax.jit(lambda x: x @ x)
        product(a).block_until_ready()
        product_seconds = _fastest(lambda: product(a).block_until_ready())
    x = np.ones(4 * 2**20, np.float32)
    return 2 * side**3 / product_seconds, 2 * x.nbytes / _fastest(x.copy)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of ROUNDS calls."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
    """The devices of every process of the job, in order, on process 0; an empty list on the others."""
    local = dataclasses.asdict(local_devices(job.process_index, job.host))
    return [ProcessDevices(**fields) for fields in job.gather("devices", local)]


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
