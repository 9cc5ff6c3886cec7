"""A weight [out, in] that lies in memory in tiles of a few outputs, to be multiplied with few rows on a CPU."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

TILE = 64  # outputs of a tile: the width at which YNNPACK multiplies, measured in benchmarks/cpu_serving
TILES = 48  # of one product, for each of which the rows are copied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledWeight:
    """The weight of a linear layer in tiles [in, TILE], zeros behind the last of its `out` outputs.

    A product with few rows is bounded by how fast the weight is read, and a tile is read from one end to the other,
    where a matrix [in, out] is read in short pieces of each of its rows. Rows are divided by `one` before they are
    copied for each tile: XLA would otherwise compute their source again in every copy, while it computes an
    expensive operation, as a division, once.
    """

    parts: tuple[Float[Array, "n i t"], ...]
    one: Float[Array, ""]
    out: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, weight: Float[Array, "o i"]) -> TiledWeight:
        """A tiled copy of a weight."""
        out, into = weight.shape
        padded = jnp.pad(weight, ((0, -out % TILE), (0, 0)))
        tiles = padded.reshape(-1, TILE, into).swapaxes(1, 2)
        return cls(tuple(jnp.copy(tiles[n : n + TILES]) for n in range(0, len(tiles), TILES)), jnp.ones(()), out)

    @property
    def matrix(self) -> Float[Array, "o i"]:
        """The weight as it was."""
        tiles = jnp.concatenate(self.parts)
        return tiles.swapaxes(1, 2).reshape(-1, tiles.shape[1])[: self.out]

    def product(self, x: Float[Array, "*B i"], out: DTypeLike, precision: lax.Precision | None) -> Float[Array, "*B o"]:
        """x times the transposed weight, accumulated and given in `out`."""
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) / self.one.astype(x.dtype)

        def times(tiles: Array) -> Array:
            copies = jnp.broadcast_to(rows, (tiles.shape[0], *rows.shape))
            batched = (((2,), (1,)), ((0,), (0,)))
            y = lax.dot_general(copies, tiles.astype(x.dtype), batched, precision=precision, preferred_element_type=out)
            return y.swapaxes(0, 1).reshape(rows.shape[0], -1)

        y = jnp.concatenate([times(tiles) for tiles in self.parts], axis=1)[:, : self.out]
        return y.reshape(*x.shape[:-1], self.out)
