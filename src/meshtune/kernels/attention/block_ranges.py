"""For each query block, the contiguous range of key blocks it can attend to, and the sub-range that needs no mask; and
the same for each key block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.blocks import TokenBlocks, fully_visible_blocks, visible_blocks


def visible_key_ranges(queries: TokenBlocks, keys: TokenBlocks, window: int | None) -> jax.Array:
    """For each query block, (start, full_start, full_stop, stop) in units of key blocks: int32 [B, q blocks, 4].

    start..stop contains every key block that the query block may see. Every token of it sees every token of the blocks
    full_start..full_stop, which lie within. All four are equal to 0 if it sees nothing.
    """
    return _ranges(visible_blocks(queries, keys, window), fully_visible_blocks(queries, keys, window), axis=1)


def visible_query_ranges(queries: TokenBlocks, keys: TokenBlocks, window: int | None) -> jax.Array:
    """For each key block, the same four numbers in units of query blocks that see it: int32 [B, kv blocks, 4]."""
    return _ranges(visible_blocks(queries, keys, window), fully_visible_blocks(queries, keys, window), axis=0)


def _ranges(visible: jax.Array, full: jax.Array, axis: int) -> jax.Array:
    """From bool arrays [q blocks, kv blocks, B]. Written as reductions, which XLA fuses with their operands: the array
    of all pairs of blocks is never materialised. For a million tokens it would have 250 million elements."""
    count = visible.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, visible.shape, axis)
    stop = jnp.max(jnp.where(visible, index + 1, 0), axis)
    start = jnp.minimum(jnp.min(jnp.where(visible, index, count), axis), stop)
    full_start = jnp.minimum(jnp.min(jnp.where(full, index, count), axis), stop)
    after_full = ~full & (index > jnp.expand_dims(full_start, axis))
    full_stop = jnp.minimum(jnp.min(jnp.where(after_full, index, count), axis), stop)
    return jnp.stack([start, full_start, full_stop, stop], -1).swapaxes(0, 1)
