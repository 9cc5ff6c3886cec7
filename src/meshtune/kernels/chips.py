"""The chip that kernels are compiled for: its vendor, architecture and shared memory."""

from __future__ import annotations

import dataclasses
import re

import jax

from meshtune.translatable import Translatable

# Bytes of shared memory that one thread block can use, by compute capability (CUDA programming guide, table of
# technical specifications, less the 1 KiB per block that the driver reserves). Others get the smallest of the recent.
NVIDIA_SHARED_MEMORY = {
    (7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (10, 1): 232448, (10, 3): 232448, (11, 0): 232448,
    (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip
NVIDIA_SHARED_MEMORY_DEFAULT = 101376
# The local data share of a work group: 64 KiB on every AMD chip but CDNA 4 (AMD's CDNA 4 architecture paper: 160 KiB).
AMD_SHARED_MEMORY = {"gfx950": 163840}
AMD_SHARED_MEMORY_DEFAULT = 65536

# Older chips have no matrix units that Triton supports: it would multiply number by number.
OLDEST_NVIDIA = (8, 0)
AMD_WITHOUT_MATRIX_UNITS = ("gfx900", "gfx902", "gfx906", "gfx909", "gfx90c", "gfx10")


@dataclasses.dataclass(frozen=True)
class Chip:
    """`vendor` is nvidia, amd, tpu, cpu or "" (unknown); `arch` as its compiler names it; `shared_memory` in bytes."""

    vendor: str
    arch: str = ""
    shared_memory: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability; (0, 0) for other vendors."""
        match = re.fullmatch(r"sm_(\d+)(\d)", self.arch)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def has_bfloat16(self) -> bool:
        """Whether its matrix units multiply bfloat16.

        NVIDIA: since Ampere (CUDA programming guide, table of technical specifications); AMD: since gfx908 and gfx11
        (their instruction set references).
        """
        if self.vendor == "nvidia":
            return self.capability >= (8, 0)
        return not self.arch.startswith(AMD_WITHOUT_MATRIX_UNITS)

    def __str__(self) -> str:
        return self.arch or self.vendor or "an unknown chip"


def chip_of(platform: str, arch: str = "") -> Chip:
    """The chip of a JAX platform with architecture `arch` ("sm_90a", "gfx942:sramecc+:xnack-", "v5p").

    Without an `arch` it is that of this process's first device, if that is of this platform.
    """
    if not arch and platform in ("gpu", "cuda", "rocm"):
        arch = arch_of(jax.devices()[0])
    if match := re.match(r"sm_(\d+)(\d)[af]?$", arch):
        name, capability = f"sm_{match[1]}{match[2]}", (int(match[1]), int(match[2]))
        return Chip("nvidia", name, NVIDIA_SHARED_MEMORY.get(capability, NVIDIA_SHARED_MEMORY_DEFAULT))
    if match := re.match(r"gfx[0-9a-f]+", arch):
        return Chip("amd", match[0], AMD_SHARED_MEMORY.get(match[0], AMD_SHARED_MEMORY_DEFAULT))
    return Chip(platform if platform in ("cpu", "tpu") else "", arch)


def without_triton(chip: Chip) -> str | None:
    """Why kernels in Triton do not serve a chip, None if they do."""
    if chip.vendor not in ("nvidia", "amd"):
        return Translatable(
            "its kernels are for NVIDIA and AMD GPUs, not for {vendor}",
            vendor=chip.vendor or Translatable("this platform"),
        )
    if chip.vendor == "nvidia" and chip.capability < OLDEST_NVIDIA:
        return Translatable("Triton needs sm_80 or newer, and this is {chip}", chip=chip)
    if chip.vendor == "amd" and chip.arch.startswith(AMD_WITHOUT_MATRIX_UNITS):
        return Translatable("{chip} has no matrix units that Triton could use", chip=chip)
    return None


def arch_of(device: jax.Device) -> str:
    """A device's architecture as its compiler names it; "" if JAX does not report it. CUDA reports "9.0", ROCm
    "gfx942"."""
    capability = str(getattr(device, "compute_capability", ""))
    if match := re.fullmatch(r"(\d+)\.(\d)", capability):
        return f"sm_{match[1]}{match[2]}"
    for name in (capability, str(device.device_kind)):
        if re.match(r"gfx[0-9a-f]+", name):
            return name
    return str(device.device_kind) if device.platform == "tpu" else ""
