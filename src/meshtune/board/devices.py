"""The devices of this machine, and the environment in which a job sees those that were chosen for it.

JAX is not asked: it would take the memory of every GPU for the server.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError
from meshtune.mesh.accelerators import SIMULATED_DEVICES, VISIBLE_DEVICE_VARIABLES, visible_gpus

CPU = "cpu"
MOST_CPU_DEVICES = 64
# What a process is told of the chips it has, by their number: columns, rows and depth.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


@dataclasses.dataclass(frozen=True)
class Device:
    """`key` names it in a choice: cuda:0, rocm:1, tpu:3, cpu."""

    key: str
    name: str


@functools.cache
def devices() -> tuple[Device, ...]:
    """Accelerators of this machine, as far as its environment shows them, and the CPU."""
    count = visible_gpus()
    nvidia = bool([path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)])
    platform = "cuda" if nvidia else "rocm"
    names = _nvidia_names() if nvidia else []
    gpus = [
        Device(f"{platform}:{index}", names[index] if index < len(names) else f"{platform} {index}")
        for index in range(count)
    ]
    chips = [] if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == CPU else glob.glob("/dev/accel[0-9]*")
    tpus = [Device(f"tpu:{index}", f"TPU {index}") for index in range(len(chips))]
    return (*gpus, *tpus, Device(CPU, f"CPU ({os.cpu_count()})"))


def checked_choice(value: object) -> dict[str, Any]:
    """A choice: {"keys": ["cuda:0"], "count": simulated devices of a CPU, "processes": n}; {} is everything there is.

    Raises: UserError for devices that this machine lacks.
    """
    if value in (None, {}):
        return {}
    if not isinstance(value, dict) or set(value) - {"keys", "count", "processes", "beside"}:
        raise UserError("the devices must be an object of keys, count, processes and beside", where="devices")
    known = [device.key for device in devices()]
    keys = value.get("keys") or []
    if not isinstance(keys, list) or not all(key in known for key in keys) or len(set(keys)) < len(keys):
        raise UserError(f"{keys} are not devices of this machine", where="devices.keys", fix=f"it has {known}")
    if len({key.partition(":")[0] for key in keys}) > 1:
        raise UserError("a run uses devices of one kind", where="devices.keys", fix="choose GPUs, TPUs or the CPU")
    if keys and keys[0].startswith("tpu") and len(keys) not in TPU_BOUNDS:
        raise UserError(f"{len(keys)} TPU chips make no grid", where="devices.keys", fix="choose 1, 2, 4 or 8")
    for name in ("count", "processes"):
        number = value.get(name, 1)
        if type(number) is not int or not 1 <= number <= MOST_CPU_DEVICES:
            raise UserError(f"{number!r} is not a number from 1 to {MOST_CPU_DEVICES}", where=f"devices.{name}")
    return {**value, "keys": keys}


def devices_of(choice: Mapping[str, Any]) -> frozenset[str]:
    """The keys of the devices that a choice takes: all accelerators, or else the CPU, where it names none; {"none":
    true} takes none."""
    if choice.get("none"):
        return frozenset()
    keys = choice.get("keys") or [device.key for device in devices() if device.key != CPU] or [CPU]
    return frozenset(keys)


def environment(choice: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a job. Indices count the devices that the board itself sees."""
    result = dict(env)
    keys = list(choice.get("keys") or [])
    platform = keys[0].partition(":")[0] if keys else None
    indices = [int(key.partition(":")[2]) for key in keys if ":" in key]
    count = choice.get("count", 1)
    if platform == CPU:
        result["JAX_PLATFORMS"] = CPU
    if platform in (CPU, None) and count > 1:
        flags = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(SIMULATED_DEVICES)]
        result["XLA_FLAGS"] = " ".join([*flags, f"{SIMULATED_DEVICES}={count}"])
    if platform in ("cuda", "rocm"):
        default = "CUDA_VISIBLE_DEVICES" if platform == "cuda" else "HIP_VISIBLE_DEVICES"
        variable = next((name for name in VISIBLE_DEVICE_VARIABLES if name in env), default)
        visible = [word.strip() for word in env[variable].split(",")] if variable in env else None
        result[variable] = ",".join(str(index) if visible is None else visible[index] for index in indices)
        if platform == "cuda":
            result.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts
    if platform == "tpu":
        result["TPU_VISIBLE_CHIPS"] = ",".join(map(str, indices))
        result["TPU_CHIPS_PER_PROCESS_BOUNDS"], result["TPU_PROCESS_BOUNDS"] = TPU_BOUNDS[len(indices)], "1,1,1"
    return result


def _nvidia_names() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines()]
