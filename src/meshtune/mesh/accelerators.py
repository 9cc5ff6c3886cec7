"""Counts and divides the GPUs of a host by the drivers' files and variables, without initialising JAX's backends."""

from __future__ import annotations

import glob
import os
import pathlib
import re
from collections.abc import Mapping

from meshtune.errors import UserError
from meshtune.mesh.rendezvous import ProcessInfo

# The first of these that is set counts, in the order in which the drivers read them.
VISIBLE_DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
SIMULATED_DEVICES = "--xla_force_host_platform_device_count"  # a flag of XLA: devices that share a CPU
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes/*/properties"


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """The number of GPUs this process may use; 0 if there are none or JAX_PLATFORMS selects the CPU."""
    if env.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    for name in VISIBLE_DEVICE_VARIABLES:
        if name in env:
            devices = [device for device in env[name].split(",") if device.strip() not in ("", "-1", "NoDevFiles")]
            return len(devices)
    nvidia = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    return len(nvidia) or sum(_is_gpu(pathlib.Path(path)) for path in glob.glob(KFD_NODES))


def _is_gpu(properties: pathlib.Path) -> bool:
    try:
        match = re.search(r"^simd_count (\d+)", properties.read_text(), re.MULTILINE)
    except OSError:
        return False  # a GPU that belongs to another container or cgroup
    return bool(match and int(match[1]))


def local_device_ids(info: ProcessInfo, visible: int) -> list[int] | None:
    """The indices, among the `visible` GPUs, of those that this process uses; None for all of them.

    Processes of one host that all see the same GPUs divide them evenly; nothing is divided if the launcher shows each
    process only its own. Raises: UserError if the GPUs cannot be divided.
    """
    if info.local_devices is None and (info.local_count <= 1 or info.devices_isolated or visible <= 1):
        return None
    if visible == 0:
        return None
    if info.local_devices is None and visible % info.local_count:
        raise UserError(
            f"{info.local_count} processes on this host see {visible} GPUs, which do not divide by {info.local_count}",
            where=f"process {info.process_index} of {info.process_count}, launched by {info.launcher}",
            fix="launch one process per host, one per GPU, or a number that divides the GPUs",
        )
    per_process = info.local_devices or visible // info.local_count
    if info.local_count * per_process > visible:
        raise UserError(
            f"{info.local_count} processes of {per_process} GPUs need {info.local_count * per_process}, and this host "
            f"has {visible}",
            where=f"process {info.process_index} of {info.process_count}, launched by {info.launcher}",
            fix="launch fewer processes, or give each fewer devices",
        )
    return list(range(info.local_index * per_process, (info.local_index + 1) * per_process))
