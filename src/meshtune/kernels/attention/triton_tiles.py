"""Block sizes, warps and pipeline stages of flash attention, by chip, head dimension and dtype.

Chosen without these chips, from their compilers' reports: the largest blocks whose values stay in registers (a spilled
one goes through memory each time) and that fit the shared memory of a thread block. The resources that each of them
needs are filed in benchmarks/kernels_deviceless; benchmarks/gpu_kernels times them on a GPU.
"""

from __future__ import annotations

import dataclasses

from meshtune.kernels.attention.backend import AttentionRequest
from meshtune.kernels.chips import Chip, chip_of

SMALLEST_HEAD, LARGEST_HEAD = 16, 256


@dataclasses.dataclass(frozen=True)
class Tile:
    """Of one kernel: tokens in a block of queries and of keys, warps per program, pipeline stages."""

    q: int
    kv: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile

    @property
    def longest(self) -> int:
        """A multiple of all block sizes: rows of tokens are padded to a multiple of it."""
        return max(n for tile in (self.forward, self.dq, self.dkv) for n in (tile.q, tile.kv))


# For bfloat16 and float16. The key is the largest padded head dimension for which an entry is used.
TilesByHeadDim = dict[int, Tiles]
HOPPER: TilesByHeadDim = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
}
# Accumulators are in a separate tensor memory, which the gradients of 64 keys of 256 columns exceed.
BLACKWELL = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 32, 4, 1)),
}
# Ampere, Ada and consumer Blackwell, whose matmuls read registers: sized for the 99 KiB of the smallest.
AMPERE = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
}
# CDNA: a warp is 64 threads with up to 512 registers; a second stage would not leave room for two warps per unit.
CDNA = {
    64: Tiles(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 64, 4, 1)),
    128: Tiles(Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(32, 64, 4, 1)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# RDNA: warps of 32 threads, 64 KiB of shared memory.
RDNA = {
    64: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
# Exact float32 matmuls use no matrix units on any chip.
FLOAT32 = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def tiles_of(request: AttentionRequest) -> Tiles:
    """The tiles for the request's chip, head dimension and dtype."""
    if request.dtype == "float32":
        return FLOAT32
    head_dim = padded_head_dim(request.head_dim)
    by_head_dim = _of_generation(chip_of(request.platform, request.chip))
    return next(tiles for largest, tiles in by_head_dim.items() if head_dim <= largest)


def _of_generation(chip: Chip) -> TilesByHeadDim:
    if chip.vendor == "amd":
        return CDNA if chip.arch.startswith("gfx9") else RDNA
    return {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}.get(chip.capability[0], AMPERE)


def padded_head_dim(head_dim: int) -> int:
    """The columns of a block: a power of two; only `head_dim` of them are loaded and stored."""
    return max(SMALLEST_HEAD, 1 << (head_dim - 1).bit_length())
