"""Rows of packed segments taken apart into chunks of tokens, for recurrences whose state is carried between chunks."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CHUNK = 64  # tokens


def chunk_size(length: int, longest: int = CHUNK) -> int:
    """A power of two: `longest`, or less for shorter rows."""
    return min(longest, 1 << (length - 1).bit_length())


def in_chunks(x: Array, size: int) -> Array:
    """[B, T, ..] as [chunks, B, size, ..]: filled up with zeros, segment ids with the last one."""
    missing = -x.shape[1] % size
    mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def in_rows(chunks: Array, length: int) -> Array:
    """The first `length` tokens of [chunks, B, size, ..] as [B, length, ..]."""
    rows = jnp.moveaxis(chunks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]


def product(equation: str, *factors: Array) -> Array:
    """A float32 einsum that no chip rounds."""
    return jnp.einsum(equation, *factors, precision=lax.Precision.HIGHEST)


def pair_decays(
    g: Float[Array, "B H C"], segment_ids: Int[Array, "B C"], state_segment: Int[Array, "B"]
) -> tuple[Float[Array, "B H C C"], Float[Array, "B H C"], Float[Array, "B H C"]]:
    """exp of the decay between tokens of a chunk, [i, j] from j to i; from the state before the chunk to each token;
    from each token to the end of the chunk. Zero between segments and backwards in time.

    `g` are the log decays of the tokens. Each sum of them is computed by itself: differences of running sums would
    lose the digits of a small one after a large one.
    """
    until = jnp.tril(jnp.ones((g.shape[-1],) * 2, g.dtype))
    equal = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (until > 0)
    between = product("it,bhtj->bhij", until, g[..., None] * (1 - until.T))
    between = jnp.exp(jnp.where(equal[:, None], between, -jnp.inf))
    from_state = (segment_ids == state_segment[:, None])[:, None]
    from_state = jnp.exp(jnp.where(from_state, jnp.cumsum(g, axis=-1), -jnp.inf))
    return between, from_state, between[..., -1, :]
