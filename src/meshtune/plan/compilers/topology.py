"""The devices of a target as JAX's own objects, made by the platform's compiler: they compile and never run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from meshtune.errors import UserError
from meshtune.plan.compilers.gpu_description import target_config
from meshtune.plan.hardware import Target


def described_devices(target: Target) -> list[Any]:
    """`target.devices` devices. Only in a process that has the platform's compiler and no other (see `child`).

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
    # Slices x hosts of a slice x devices of a host: what no fast link joins is a slice of its own.
    shape = f"{target.hosts}x1x{target.each}"
    described = topologies.get_topology_desc(
        "described", platform=platform, topology=shape, target_config=target_config(target.device)
    )
    return list(described.devices)


def tpu_slice(target: Target) -> tuple[str, dict[str, Any]]:
    """The topology's name for libtpu and its options: `target.hosts` slices of `target.each` devices.

    A slice is the most cubic torus of whole hosts, or part of one host. Raises: UserError if there is none.
    """
    device = target.device
    host = device.host_chips or (2, 2, 1)
    chips, rest = divmod(target.each, device.chip_devices)
    shape = None if rest else slice_shape(chips, host)
    if shape is None:
        fits = [n for n in range(1, 4 * max(1, target.each) + 1) if slice_shape(n, host)]
        near = sorted(fits, key=lambda n: abs(n - target.each / device.chip_devices))[:3]
        raise UserError(
            f"{target.each} devices form no slice of {device.name}",
            where="--target",
            fix="take " + " or ".join(f"{n * device.chip_devices}x{device.name}" for n in sorted(near)),
        )
    bounds = tuple(min(size, most) for size, most in zip(shape, host, strict=True))
    options: dict[str, Any] = {"chips_per_host_bounds": (*bounds, *[1] * (3 - len(bounds)))}
    if device.arch == "v4":  # the two cores of its chips are one device to JAX; the compiler must be told
        options["chip_config_name"] = "megacore"
    if target.hosts > 1:
        options["num_slices"] = target.hosts
    return f"{device.arch}:{'x'.join(map(str, shape))}", options


def slice_shape(chips: int, host: Sequence[int]) -> tuple[int, ...] | None:
    """Chips along each dimension: whole hosts of `host` chips, or for fewer a part of one; None where nothing fits."""
    if chips < math.prod(host):
        parts = [shape for shape in _shapes(chips, len(host)) if all(n <= m for n, m in zip(shape, host, strict=True))]
        return min(parts, key=lambda shape: (max(shape), shape), default=None)
    wholes = [shape for shape in _shapes(chips, len(host)) if not any(n % m for n, m in zip(shape, host, strict=True))]
    # As cubic as it gets, and of those the one whose longest side is last, as Google's slices are named.
    return min(wholes, key=lambda shape: (max(shape) - min(shape), shape), default=None)


def _shapes(count: int, dimensions: int) -> list[tuple[int, ...]]:
    if dimensions == 1:
        return [(count,)]
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(n, *rest) for n in divisors for rest in _shapes(count // n, dimensions - 1)]


def refused_bytes(words: str) -> int | None:
    """Of the compiler's words where a program does not fit: the bytes it says it needs on one device, None if none.

    What libtpu calls temporaries there has the program's arguments among it.
    """
    found = re.search(r"(?:memory required for [\w ]+\(|Used )([\d.]+)([KMGT]?)\b", words)
    if found is None:
        return None
    return int(float(found[1]) * 2 ** {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2]])
