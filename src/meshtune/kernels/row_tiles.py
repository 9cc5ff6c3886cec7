"""Tiles of rows that are sorted by group; no tile spans two groups."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class RowTiles(NamedTuple):
    """The tiles in the order of their rows: `count` of them, and beyond these tiles without rows, of any group.

    A tile has the rows from its `first` on, as many as a tile has at most, that lie before its group's `end`.
    """

    group: Int[Array, "S"]
    first: Int[Array, "S"]
    end: Int[Array, "S"]
    count: Int[Array, ""]


def row_tiles(sizes: Int[Array, "E"], rows: int, size: int) -> RowTiles:
    """The tiles of at most `size` rows for groups of `sizes` rows, together at most `rows`."""
    groups = sizes.shape[0]
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // size)
    after = jnp.cumsum(counts)
    longest = rows // size + groups
    group = jnp.repeat(jnp.arange(groups), counts, total_repeat_length=longest)
    tile = jnp.arange(longest)
    first = ends[group] - sizes[group] + (tile - (after[group] - counts[group])) * size
    real = tile < after[-1]
    return RowTiles(group, jnp.where(real, first, rows), jnp.where(real, ends[group], 0), after[-1])
