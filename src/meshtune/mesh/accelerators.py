"""The accelerators a process may use, counted without starting JAX's backends: files and variables of the drivers."""

from __future__ import annotations

import glob
import os
import pathlib
import re
from collections.abc import Mapping

from meshtune.errors import UserError
from meshtune.mesh.peers import Place

# The first that is set counts, as in the drivers' own order.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
KFD = "/sys/class/kfd/kfd/topology/nodes/*/properties"


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """GPUs this process may use; 0 where there are none or JAX is told to use the CPU."""
    if env.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    for name in VISIBLE:
        if name in env:
            shown = [word for word in env[name].split(",") if word.strip() not in ("", "-1", "NoDevFiles")]
            return len(shown)
    nvidia = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    return len(nvidia) or sum(_is_gpu(pathlib.Path(path)) for path in glob.glob(KFD))


def _is_gpu(properties: pathlib.Path) -> bool:
    try:
        found = re.search(r"^simd_count (\d+)", properties.read_text(), re.MULTILINE)
    except OSError:
        return False  # a GPU of another container or cgroup
    return bool(found and int(found[1]))


def own_gpus(place: Place, visible: int) -> list[int] | None:
    """Which of the `visible` GPUs this process drives; None is all of them.

    Processes that share a host and all see the same GPUs divide them evenly; where the launcher shows each process its
    own, nothing is divided. Raises: UserError if they do not divide.
    """
    local, each = place.local_processes, place.local_devices
    if each is None and (local <= 1 or place.own_devices or visible <= 1):
        return None
    if visible == 0:
        return None
    if each is None and visible % local:
        raise UserError(
            f"{local} processes on this host see {visible} GPUs, which do not divide by {local}",
            where=f"process {place.process} of {place.processes}, launched by {place.launcher}",
            fix="launch one process a host, one for each GPU, or a number that divides the GPUs",
        )
    each = each or visible // local
    if local * each > visible:
        raise UserError(
            f"{local} processes of {each} GPUs need {local * each}, and this host has {visible}",
            where=f"process {place.process} of {place.processes}, launched by {place.launcher}",
            fix="launch fewer processes, or with fewer devices each",
        )
    return list(range(place.local_process * each, (place.local_process + 1) * each))
