"""For every block of one side, the run of blocks of the other side it must meet, and where in it no mask is needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.blocks import Tokens, visible_blocks, wholly_visible


def reach(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """For each block of queries, four numbers of key blocks: int32 [B, q blocks, 4].

    Blocks start..stop hold all that the block may see; every token of it sees every token of blocks whole..broken,
    which lie between them. Where it sees nothing all four are 0.
    """
    return _runs(visible_blocks(queries, keys, window), wholly_visible(queries, keys, window), axis=1)


def reached_by(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """The other way round: for each block of keys, the blocks of queries that see it. int32 [B, kv blocks, 4]."""
    return _runs(visible_blocks(queries, keys, window), wholly_visible(queries, keys, window), axis=0)


def _runs(seen: jax.Array, whole: jax.Array, axis: int) -> jax.Array:
    """Of bool [q blocks, kv blocks, B]. Written as sums over what the compiler makes as it goes: nothing of the size
    of all pairs of blocks is held, which for a million tokens would be a quarter of a billion."""
    count = seen.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, seen.shape, axis)
    stop = jnp.max(jnp.where(seen, index + 1, 0), axis)
    start = jnp.minimum(jnp.min(jnp.where(seen, index, count), axis), stop)
    first = jnp.minimum(jnp.min(jnp.where(whole, index, count), axis), stop)
    after = ~whole & (index > jnp.expand_dims(first, axis))
    broken = jnp.minimum(jnp.min(jnp.where(after, index, count), axis), stop)
    return jnp.stack([start, first, broken, stop], -1).swapaxes(0, 1)
