"""Devices that are only described, as the compilers take them.

Fields as in openxla/xla, stream_executor/device_description.proto.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.costs.hardware import Device, Target
from meshtune.errors import UserError

if TYPE_CHECKING:
    import jax

VENDORS = {"cuda": "NVIDIA Corporation", "rocm": "Advanced Micro Devices, Inc.", "oneapi": "Intel(R) Corporation"}
NAMES = {"cuda": "CUDA", "rocm": "ROCM", "oneapi": "SYCL"}
CDNA_WARP, WARP = 64, 32  # threads; gfx9 are AMD's chips for data centres, gfx10 to gfx12 its cards for desktops
# Versions of libraries that are not installed: XLA decides by them which library kernels it may call.
DNN = {"cuda": "9.10.2", "rocm": "1.3.0", "oneapi": "0.0.0"}
TOOLKIT = {"cuda": "12.9.0", "rocm": "7.0.0", "oneapi": "1.6.0"}


def target_config(device: Device) -> str:
    """The text proto of a CUDA, ROCm or oneAPI device. Raises: UserError if its description is incomplete."""
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
        "threads_per_warp": CDNA_WARP if device.arch.startswith("gfx9") else WARP,
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
            f'platform_name: "{NAMES[device.platform]}"',
            f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}",
            f"device_description_str: {_literal(device.kind or device.name)}",
        ]
    )


def _capability(device: Device) -> list[str]:
    arch = device.compiled_as or device.arch
    if device.platform == "oneapi":
        return [f"  oneapi_compute_capability {{ architecture: {_literal(arch)} }}"]
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


def described_devices(target: Target) -> list[jax.Device]:
    """`target.devices` device objects. The process must have loaded the platform's compiler and no other (see `child`).

    Raises: UserError for a number of TPUs that forms no slice.
    """
    import jax
    from jax.experimental import topologies

    platform = target.device.platform
    if platform == "cpu":
        return jax.devices("cpu")[: target.devices]
    if platform == "tpu":
        name, options = tpu_slice(target)
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    # Slices x hosts per slice x devices per host: hosts without a fast link between them are slices of their own.
    shape = f"{target.hosts}x1x{target.per_host}"
    described = topologies.get_topology_desc(
        "described", platform=platform, topology=shape, target_config=target_config(target.device)
    )
    return list(described.devices)


def tpu_slice(target: Target) -> tuple[str, dict[str, object]]:
    """libtpu's name of the topology and its options, for `target.hosts` slices of `target.per_host` devices.

    A slice is the most cubic torus of whole hosts, or a part of one host. Raises: UserError if there is none.
    """
    device = target.device
    host = device.host_chips or (2, 2, 1)
    chips, remainder = divmod(target.per_host, device.chip_devices)
    shape = None if remainder else slice_shape(chips, host)
    if shape is None:
        fits = [n for n in range(1, 4 * max(1, target.per_host) + 1) if slice_shape(n, host)]
        near = sorted(fits, key=lambda n: abs(n - target.per_host / device.chip_devices))[:3]
        raise UserError(
            f"{target.per_host} devices form no slice of {device.name}",
            where="--target",
            fix="take " + " or ".join(f"{n * device.chip_devices}x{device.name}" for n in sorted(near)),
        )
    bounds = tuple(min(size, limit) for size, limit in zip(shape, host, strict=True))
    options: dict[str, object] = {"chips_per_host_bounds": (*bounds, *[1] * (3 - len(bounds)))}
    if device.arch == "v4":  # JAX sees the two cores of a chip as one device; the compiler must be told
        options["chip_config_name"] = "megacore"
    if target.hosts > 1:
        options["num_slices"] = target.hosts
    return f"{device.arch}:{'x'.join(map(str, shape))}", options


def slice_shape(chips: int, host: Sequence[int]) -> tuple[int, ...] | None:
    """Chips along each dimension, in whole hosts of `host` chips or a part of one; None if there is no such shape."""
    if chips < math.prod(host):
        parts = [shape for shape in _shapes(chips, len(host)) if all(n <= m for n, m in zip(shape, host, strict=True))]
        return min(parts, key=lambda shape: (max(shape), shape), default=None)
    whole_hosts = [
        shape for shape in _shapes(chips, len(host)) if not any(n % m for n, m in zip(shape, host, strict=True))
    ]
    # The most cubic shape; of equal ones, that with its longest side last, as Google names slices.
    return min(whole_hosts, key=lambda shape: (max(shape) - min(shape), shape), default=None)


def _shapes(count: int, dimensions: int) -> list[tuple[int, ...]]:
    if dimensions == 1:
        return [(count,)]
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(n, *inner) for n in divisors for inner in _shapes(count // n, dimensions - 1)]


def refused_bytes(message: str) -> int | None:
    """The bytes per device that a compiler's out-of-memory message says the program needs, None if it states none.

    The temporaries of libtpu's message include the program's arguments.
    """
    size = re.search(r"(?:memory required for [\w ]+\(|Used )([\d.]+)([KMGT]?)\b", message)
    if size is None:
        return None
    return int(float(size[1]) * 2 ** {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[size[2]])
