"""Tokens in the blocks of flash attention, warps and pipeline stages, by chip, head dimension and dtype."""

from __future__ import annotations

import dataclasses

from meshtune.kernels.attention.request import AttentionRequest
from meshtune.kernels.chips import chip_of


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


SMALLEST_HEAD, LARGEST_HEAD = 16, 256


def tiles_of(request: AttentionRequest) -> Tiles:
    """What fits the chip's shared memory and registers; shown by compiling in benchmarks/kernels_deviceless."""
    chip, width = chip_of(request.platform, request.chip), width_of(request.head_dim)
    if request.dtype == "float32":
        return Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    if chip.maker == "amd":
        small = Tile(32, 32, 4, 1) if width > 128 else Tile(64, 32, 4, 1)
        return Tiles(
            Tile(64, 32, 4, 1) if width > 128 else Tile(128, 64, 4, 1), small, dataclasses.replace(small, q=32)
        )
    if width > 128:
        return Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    return Tiles(Tile(128, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))


def width_of(head_dim: int) -> int:
    """The columns of a block: a power of two, of which only `head_dim` are loaded and stored."""
    return max(SMALLEST_HEAD, 1 << (head_dim - 1).bit_length())
