"""The devices that a program is made for: those of this job, or devices that are only described."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Machine:
    """`platform` is cpu, cuda, rocm or tpu; `devices` are JAX's, all of the job's; `chip` their arch, "": ask them."""

    platform: str
    devices: Sequence[jax.Device]
    chip: str = ""


def this_machine() -> Machine:
    """The devices JAX sees here, in all processes of the job."""
    return Machine(platform_here(), tuple(jax.devices()))


def platform_here() -> str:
    """JAX's default backend by the name of its compiler: it says gpu of two kinds."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
