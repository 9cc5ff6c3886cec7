"""What kernels must know of the chip they are made for: whose it is, and how much memory a block of threads shares."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

# Bytes that one block of threads can have of shared memory, by compute capability (CUDA programming guide, table of
# technical specifications, less the 1 KiB a block that the driver keeps). What is not listed gets the least of them.
NVIDIA_SHARED = {
    (7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376,
    (9, 0): 232448, (10, 0): 232448, (10, 1): 232448, (10, 3): 232448, (11, 0): 232448,
    (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip
NVIDIA_LEAST = 101376
# The local data share of a work group: 64 KiB on every AMD chip but CDNA 4 (AMD's CDNA 4 architecture paper: 160 KiB).
AMD_SHARED = {"gfx950": 163840}
AMD_LEAST = 65536


@dataclasses.dataclass(frozen=True)
class Chip:
    """`maker` is nvidia, amd, tpu, cpu or "" (unknown); `arch` as its compiler names it; `shared_memory` in bytes."""

    maker: str
    arch: str = ""
    shared_memory: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA's compute capability, (0, 0) for any other maker's."""
        found = re.fullmatch(r"sm_(\d+)(\d)", self.arch)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def __str__(self) -> str:
        return self.arch or self.maker or "an unknown chip"


def chip_of(platform: str, arch: str = "") -> Chip:
    """The chip a program is made for: `arch` ("sm_90a", "gfx942:sramecc+:xnack-", "v5p") of a JAX platform.

    Without an `arch` it is the first device here, if that is of this platform.
    """
    if not arch and platform in ("gpu", "cuda", "rocm"):
        arch = arch_of(jax.devices()[0])
    if found := re.match(r"sm_(\d+)(\d)[af]?$", arch):
        name, capability = f"sm_{found[1]}{found[2]}", (int(found[1]), int(found[2]))
        return Chip("nvidia", name, NVIDIA_SHARED.get(capability, NVIDIA_LEAST))
    if found := re.match(r"gfx[0-9a-f]+", arch):
        return Chip("amd", found[0], AMD_SHARED.get(found[0], AMD_LEAST))
    return Chip(platform if platform in ("cpu", "tpu") else "", arch)


def arch_of(device: Any) -> str:
    """A device's chip as its compiler names it, "" where JAX does not say: CUDA says "9.0", ROCm "gfx942"."""
    said = str(getattr(device, "compute_capability", ""))
    if found := re.fullmatch(r"(\d+)\.(\d)", said):
        return f"sm_{found[1]}{found[2]}"
    for name in (said, str(device.device_kind)):
        if re.match(r"gfx[0-9a-f]+", name):
            return name
    return str(device.device_kind) if device.platform == "tpu" else ""
