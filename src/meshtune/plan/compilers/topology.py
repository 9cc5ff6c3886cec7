"""The devices of a target as JAX device objects: programs can be compiled for them but not run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.costs.hardware import Target
from meshtune.errors import UserError
from meshtune.plan.compilers.gpu_description import target_config

if TYPE_CHECKING:
    import jax


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
