"""The devices that a program is compiled for: those of this job, or a described target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a job as JAX lists them, on all of its processes.

    `platform` is cpu, cuda, rocm or tpu. `chip` is the architecture of the devices; if empty, kernels query them.
    """

    platform: str
    devices: Sequence[jax.Device]
    chip: str = ""


def this_machine() -> Machine:
    """Returns the machine of the running job."""
    return Machine(platform_here(), tuple(jax.devices()))


def platform_here() -> str:
    """Returns JAX's default backend as cpu, cuda, rocm or tpu, where JAX itself calls both cuda and rocm gpu."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
