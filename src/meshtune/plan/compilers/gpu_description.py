"""The description of a GPU that XLA compiles for: a GpuTargetConfigProto in text format.

Fields as in openxla/xla, stream_executor/device_description.proto.
"""

from __future__ import annotations

import re

from meshtune.costs.hardware import Device
from meshtune.errors import UserError

VENDORS = {"cuda": "NVIDIA Corporation", "rocm": "Advanced Micro Devices, Inc."}
WARPS = {"cuda": 32, "rocm": 64}
# Versions of libraries that are not installed: XLA decides by them which library kernels it may call.
DNN = {"cuda": "9.10.2", "rocm": "1.3.0"}
TOOLKIT = {"cuda": "12.9.0", "rocm": "7.0.0"}


def target_config(device: Device) -> str:
    """The text proto of a CUDA or ROCm device. Raises: UserError if its description is incomplete."""
    facts = {"arch": device.arch, "cores": device.cores, "shared_memory": device.shared_memory, "l2": device.l2}
    facts |= {"clock_ghz": device.clock_ghz, "bandwidth": device.bandwidth}
    missing = [name for name, value in facts.items() if not value]
    if missing or device.shared_memory is None or len(device.shared_memory) != 3 or device.bandwidth is None:
        raise UserError(
            f"{device.name} is not described well enough to compile for: {', '.join(missing) or 'shared_memory'}",
            where=f"[{device.name}]",
            fix="give arch, cores, shared_memory (three numbers), l2, clock_ghz and bandwidth as costs/hardware.toml",
        )
    block, optin, core = device.shared_memory
    version, toolkit = DNN[device.platform], TOOLKIT[device.platform]
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": WARPS[device.platform],
        "shared_memory_per_block": block,
        "shared_memory_per_block_optin": optin,
        "shared_memory_per_core": core,
        "threads_per_core_limit": device.threads_per_core,
        "core_count": device.cores,
        "fpus_per_core": device.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64 if device.platform == "cuda" else 1024,
        "memory_bandwidth": int(device.bandwidth),
        "l2_cache_size": device.l2,
        "clock_rate_ghz": device.clock_ghz,
        "device_memory_size": device.memory,
        "registers_per_core_limit": device.registers,
        "registers_per_block_limit": device.registers,
        "device_vendor": VENDORS[device.platform],
        "platform_version": f"Compute Capability {device.arch}" if device.platform == "cuda" else device.arch,
        "device_address_bits": 64,
        "name": device.kind or device.name,
        "driver_version": toolkit,
        "runtime_version": toolkit,
        "compile_time_toolkit_version": toolkit,
        "dnn_version": version,
    }
    lines = [f"  {name}: {_literal(value)}" for name, value in info.items()]
    major, minor, patch = version.split(".")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            *_capability(device),
            "}",
            f'platform_name: "{device.platform.upper()}"',
            f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}",
            f"device_description_str: {_literal(device.kind or device.name)}",
        ]
    )


def _capability(device: Device) -> list[str]:
    arch = device.compiled_as or device.arch
    if device.platform == "rocm":
        return [f"  rocm_compute_capability {{ gcn_arch_name: {_literal(arch)} }}"]
    parsed = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if parsed is None:
        raise UserError(
            f"arch = '{arch}' is not the name of an NVIDIA chip",
            where=f"[{device.name}]",
            fix="write it as sm_90a or sm_80",
        )
    extension = {"a": "ACCELERATED_FEATURES", "f": "FAMILY_COMPATIBLE_FEATURES", "": "NONE"}[parsed[3]]
    return [
        f"  cuda_compute_capability {{ major: {parsed[1]} minor: {parsed[2]} feature_extension: {extension} }}",
    ]


def _literal(value: object) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else str(value)
