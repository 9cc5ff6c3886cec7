"""Tokens in the blocks of flash attention, warps and pipeline stages, by chip, head dimension and dtype.

Chosen without these chips at hand, by what their compilers say: the largest blocks whose numbers stay in registers (a
spilled one goes through memory each time) and that fit the shared memory of a block of threads. What each of them
takes is filed in benchmarks/kernels_deviceless; benchmarks/gpu_kernels times them where there is a GPU.
"""

from __future__ import annotations

import dataclasses

from meshtune.kernels.attention.request import AttentionRequest
from meshtune.kernels.chips import Chip, chip_of

SMALLEST_HEAD, LARGEST_HEAD = 16, 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """One kernel's: tokens in a block of queries and of keys, warps of a program, stages of its pipeline."""

    q: int
    kv: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    forward: Tile
    dq: Tile
    dkv: Tile

    @property
    def longest(self) -> int:
        """All blocks divide it: rows of tokens are padded to a multiple of it."""
        return max(n for tile in (self.forward, self.dq, self.dkv) for n in (tile.q, tile.kv))


# By the width of a head, up to which each serves. For bfloat16 and float16.
HOPPER = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
}
# Sums lie in a tensor memory of their own, which the gradients of 64 keys of 256 columns overfill.
BLACKWELL = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 32, 4, 1)),
}
# Ampere, Ada and consumer Blackwell, whose products read registers: what fits the 99 KiB of the smallest suits all.
AMPERE = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
}
# CDNA: a warp is 64 threads with up to 512 registers; a second stage would not leave room for two warps a unit.
CDNA = {
    64: Tiles(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 64, 4, 1)),
    128: Tiles(Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(32, 64, 4, 1)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# RDNA: half as wide warps, 64 KiB.
RDNA = {
    64: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# Exact float32 products are made number by number, by any chip.
FLOAT32 = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def tiles_of(request: AttentionRequest) -> Tiles:
    """The blocks for this request's chip."""
    if request.dtype == "float32":
        return FLOAT32
    by_width, width = _family(chip_of(request.platform, request.chip)), width_of(request.head_dim)
    return next(tiles for most, tiles in by_width.items() if width <= most)


def _family(chip: Chip) -> dict[int, Tiles]:
    if chip.maker == "amd":
        return CDNA if chip.arch.startswith("gfx9") else RDNA
    return {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}.get(chip.capability[0], AMPERE)


def width_of(head_dim: int) -> int:
    """The columns of a block: a power of two, of which only `head_dim` are loaded and stored."""
    return max(SMALLEST_HEAD, 1 << (head_dim - 1).bit_length())
