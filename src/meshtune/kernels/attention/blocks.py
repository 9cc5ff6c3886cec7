"""How rows are cut into blocks, and which blocks may see each other: shared by all blockwise backends."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.backend import AttentionInputs, AttentionRequest

Tree = TypeVar("Tree")


class TokenBlocks(NamedTuple):
    """Positions and segments of the queries or of the keys, and the segments that those of queries continue and the
    last positions that they see, if any, in blocks: int32 [n, B, tokens of a block]."""

    positions: jax.Array
    segments: jax.Array
    parents: jax.Array | None = None
    reach: jax.Array | None = None


class Visits(NamedTuple):
    """The key blocks that query blocks visit: those with the numbers start..stop, int32 [q blocks].

    Where segments continue others, what a query block may see has gaps (the other completions of its prompt). There a
    number is a place in `order` int32 [q blocks, kv blocks], whose first blocks are the visible ones; else it is None.
    """

    start: jax.Array
    stop: jax.Array
    order: jax.Array | None = None

    def key_block(self, number: jax.Array) -> jax.Array:
        """The key block with this number, in the visits of one query block."""
        return number if self.order is None else self.order[number]


class BlockMask(NamedTuple):
    """The mask and biases of scores: the tokens of both sides in blocks, and which blocks may see each other.

    `queries` has a token for each row R of a block of scores. `visible` is bool [q blocks, kv blocks]. `slopes` [K,R]
    are the ALiBi slopes of the rows, or None. `visits` are the key blocks that each query block visits, all of them or
    only those that it may see.
    """

    queries: TokenBlocks
    keys: TokenBlocks
    visible: jax.Array
    visits: Visits
    slopes: jax.Array | None = None


def block_sizes(request: AttentionRequest) -> tuple[int, int]:
    """Tokens in a block of queries and in a block of keys.

    On CPU, blocks of 64 keep a block's scores in the cache and fit a packed row's documents closely (measured in
    benchmarks/cpu_kernels). Elsewhere an iteration of a loop costs more than memory does, so blocks are larger (not
    measured).
    """
    block = 64 if request.platform == "cpu" else 256
    return min(block, request.q_length), min(block, request.kv_length)


def q_token_blocks(request: AttentionRequest, inputs: AttentionInputs) -> TokenBlocks:
    block = block_sizes(request)[0]
    return token_blocks(block, inputs.q_positions, inputs.q_segments, inputs.q_parents, inputs.q_reach)


def kv_token_blocks(request: AttentionRequest, inputs: AttentionInputs) -> TokenBlocks:
    return token_blocks(block_sizes(request)[1], inputs.kv_positions, inputs.kv_segments)


def token_blocks(
    block: int,
    positions: jax.Array,
    segments: jax.Array,
    parents: jax.Array | None = None,
    reach: jax.Array | None = None,
) -> TokenBlocks:
    """From int32 [B,T]; the last block is padded with segment 0."""

    def in_blocks(x: jax.Array) -> jax.Array:
        return _pad_to_block(x, block).reshape(x.shape[0], -1, block).swapaxes(0, 1)

    return jax.tree.map(in_blocks, TokenBlocks(positions, segments, parents, reach))


def inputs_mask(request: AttentionRequest, inputs: AttentionInputs) -> BlockMask:
    """The mask of all queries against all keys of `inputs`."""
    return block_mask(request, q_token_blocks(request, inputs), kv_token_blocks(request, inputs), inputs.slopes)


def block_mask(
    request: AttentionRequest, queries: TokenBlocks, keys: TokenBlocks, slopes: jax.Array | None = None
) -> BlockMask:
    """Repeats the tokens and `slopes` [H] for the rows of a block of scores, which has a row for each query and for
    each query head that shares the key head."""
    visible, group = any_visible(queries, keys, request.window, request.causal), request.heads // request.kv_heads
    slopes = None if slopes is None else rows_of_heads(request, slopes)
    rows = jax.tree.map(lambda x: jnp.tile(x, group), queries)
    return BlockMask(rows, keys, visible, _visits(visible, gaps=queries.parents is not None), slopes)


def _visits(visible: jax.Array, gaps: bool) -> Visits:
    """Of bool [q blocks, kv blocks]: from the first visible block to the last, or only the visible ones."""
    if not gaps:
        return Visits(*true_range(visible))
    count = visible.sum(1, dtype=jnp.int32)
    return Visits(jnp.zeros_like(count), count, jnp.argsort(~visible, axis=1, stable=True).astype(jnp.int32))


def rows_of_heads(request: AttentionRequest, numbers: jax.Array) -> jax.Array:
    """A number for each head [H] as one for each row of a block of scores [K,R]."""
    group = request.heads // request.kv_heads
    return jnp.repeat(numbers.reshape(request.kv_heads, group), block_sizes(request)[0], axis=1)


def any_visible(queries: TokenBlocks, keys: TokenBlocks, window: int | None, causal: bool = True) -> jax.Array:
    """`visible_blocks` in any row of the batch: bool [q blocks, kv blocks]."""
    return visible_blocks(queries, keys, window, causal).any(-1)


def visible_blocks(queries: TokenBlocks, keys: TokenBlocks, window: int | None, causal: bool = True) -> jax.Array:
    """False if no token of a query block sees any token of a key block: bool [q blocks, kv blocks, B].

    Conservative: computed from the ranges of segments and positions in a block, so it may be True without need, but is
    never False wrongly. A token that sees another of its segment has a (segment, position) that is not less, so the
    maximum of a query block must not be less than the minimum of a key block. For rows with rising segments the visible
    blocks are those on and below the diagonal, also if a row is stored in another order (a ring's devices store it in
    zig-zag order). Of the segments that queries' segments continue only the range is compared.
    """
    own = visible_own_blocks(queries, keys, window, causal)
    return own if queries.parents is None else own | visible_parent_blocks(queries, keys, window, causal)


def visible_own_blocks(queries: TokenBlocks, keys: TokenBlocks, window: int | None, causal: bool = True) -> jax.Array:
    """`visible_blocks` as far as tokens see their own segment."""
    last = queries.positions if queries.reach is None else queries.reach
    q_first = _token_ranges(*queries[:2])[2][:, None]
    q_low, q_high, _, q_last, _, q_maximum = (bound[:, None] for bound in _token_ranges(last, queries.segments))
    kv_low, kv_high, kv_first, kv_last, kv_minimum, _ = (bound[None] for bound in _token_ranges(*keys[:2]))
    visible = (q_low <= kv_high) & (kv_low <= q_high)
    if not causal:
        return visible
    visible &= q_last >= kv_first
    visible &= (q_high > kv_low) | (q_maximum >= kv_minimum)
    if window is not None:
        visible &= q_first - kv_last < window
    return visible


def visible_parent_blocks(
    queries: TokenBlocks, keys: TokenBlocks, window: int | None, causal: bool = True
) -> jax.Array:
    """`visible_blocks` as far as tokens see the segment that theirs continues."""
    assert queries.parents is not None
    low, high, q_first, q_last, *_ = (bound[:, None] for bound in _token_ranges(queries.positions, queries.parents))
    kv_low, kv_high, kv_first, kv_last, *_ = (bound[None] for bound in _token_ranges(*keys[:2]))
    visible = (low <= kv_high) & (kv_low <= high)
    if not causal:
        return visible
    visible &= q_last >= kv_first
    return visible if window is None else visible & (q_first - kv_last < window)


def fully_visible_blocks(queries: TokenBlocks, keys: TokenBlocks, window: int | None) -> jax.Array:
    """True if every token of a query block sees every token of a key block: bool [q blocks, kv blocks, B].

    Conservative: it may be False without need, but is never True wrongly.
    """
    q_first, q_last, kv_first, kv_last = (
        bound(tokens.positions, -1) for tokens in (queries, keys) for bound in (jnp.min, jnp.max)
    )
    q_segment, kv_segment = _only_number(queries.segments)[:, None], _only_number(keys.segments)[None]
    visible = (q_segment == kv_segment) & (q_segment > 0)
    if queries.parents is not None:
        parent = _only_number(queries.parents)[:, None]
        visible |= (parent == kv_segment) & (parent > 0)
    visible &= q_first[:, None] >= kv_last[None]
    if window is not None:
        visible &= q_last[:, None] - kv_first[None] < window
    return visible


def _token_ranges(positions: jax.Array, segments: jax.Array) -> tuple[jax.Array, ...]:
    """For each block, ignoring padding, int32 [n, B]: the least and greatest segment, the least and greatest position,
    the least position in the least segment, and the greatest position in the greatest segment."""
    # A block of padding only gets an empty range of segments, which overlaps no other. Small enough to be subtracted.
    limit = jnp.int32(2**30)
    real = segments != 0
    low, high = jnp.where(real, segments, limit).min(-1), jnp.where(real, segments, -limit).max(-1)
    return (
        low,
        high,
        jnp.where(real, positions, limit).min(-1),
        jnp.where(real, positions, -limit).max(-1),
        jnp.where(segments == low[..., None], positions, limit).min(-1),
        jnp.where(segments == high[..., None], positions, -limit).max(-1),
    )


def _only_number(segments: jax.Array) -> jax.Array:
    """For each block the segment of all its tokens, or 0 if there are several: int32 [n, B]."""
    low, high = segments.min(-1), segments.max(-1)
    return jnp.where(low == high, low, 0)


def true_range(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each row of a bool [n, m]: the index of the first True and of the last True plus one; 0 and 0 without any."""
    any_true = x.any(1)
    start = jnp.where(any_true, jnp.argmax(x, 1), 0)
    stop = jnp.where(any_true, x.shape[1] - jnp.argmax(x[:, ::-1], 1), 0)
    return start, stop


def get_block(tree: Tree, index: jax.Array) -> Tree:
    """The block at `index` of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def add_to_block(x: jax.Array, index: jax.Array, addend: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, get_block(x, index) + addend, index, 0)


def _pad_to_block(x: jax.Array, block: int) -> jax.Array:
    """Axis 1 padded with zeros to a multiple of `block`; padded tokens get segment 0, which is invisible."""
    missing = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def q_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    """[B,T,H,h] to [n, B,K,R,h]: the query heads of a key head share its matmuls as G * block rows."""
    block, K = block_sizes(request)[0], request.kv_heads
    x = _pad_to_block(x, block)
    B, T, H, h = x.shape
    x = x.reshape(B, T // block, block, K, H // K, h).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(T // block, B, K, H // K * block, h)


def from_q_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    """The inverse of `q_blocks`."""
    n, B, K, R, h = x.shape
    block = block_sizes(request)[0]
    x = x.reshape(n, B, K, R // block, block, h).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, n * block, K * R // block, h)[:, : request.q_length]


def kv_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    """[B,S,K,h] to [n, B,K,block,h]."""
    block = block_sizes(request)[1]
    x = _pad_to_block(x, block)
    B, S, K, h = x.shape
    return x.reshape(B, S // block, block, K, h).transpose(1, 0, 3, 2, 4)


def from_kv_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    """The inverse of `kv_blocks`."""
    n, B, K, block, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, n * block, K, h)[:, : request.kv_length]


def visible_key_ranges(queries: TokenBlocks, keys: TokenBlocks, window: int | None) -> jax.Array:
    """For each query block, (start, full_start, full_stop, stop) in units of key blocks: int32 [B, q blocks, 4].

    start..stop contains every key block that the query block may see. Every token of it sees every token of the blocks
    full_start..full_stop, which lie within. All four are equal to 0 if it sees nothing. Where segments continue others
    there are two such ranges, one after another and without a common block: int32 [B, q blocks, 8].
    """
    return _visible_ranges(queries, keys, window, axis=1)


def visible_query_ranges(queries: TokenBlocks, keys: TokenBlocks, window: int | None) -> jax.Array:
    """For each key block, the same numbers in units of query blocks that see it: int32 [B, kv blocks, 4 or 8]."""
    return _visible_ranges(queries, keys, window, axis=0)


def _visible_ranges(queries: TokenBlocks, keys: TokenBlocks, window: int | None, axis: int) -> jax.Array:
    own, full = visible_own_blocks(queries, keys, window), fully_visible_blocks(queries, keys, window)
    if queries.parents is None:
        return _ranges(own, full, axis)
    first, second = (_range(x, axis) for x in (own, visible_parent_blocks(queries, keys, window)))
    # By their starts, and the second without what the first one has.
    (start, stop), (other_start, other_stop) = (
        [jnp.where(second[0] < first[0], y, x) for x, y in zip(first, second, strict=True)],
        [jnp.where(second[0] < first[0], x, y) for x, y in zip(first, second, strict=True)],
    )
    other_start = jnp.maximum(stop, other_start)
    index = jax.lax.broadcasted_iota(jnp.int32, own.shape, axis)

    def ranges(start: jax.Array, stop: jax.Array) -> jax.Array:
        within = (index >= jnp.expand_dims(start, axis)) & (index < jnp.expand_dims(stop, axis))
        return _ranges(within, full & within, axis)

    return jnp.concatenate([ranges(start, stop), ranges(other_start, jnp.maximum(other_stop, other_start))], -1)


def _range(visible: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The first visible block and the last plus one, both 0 without any: int32 without `axis`."""
    count = visible.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, visible.shape, axis)
    stop = jnp.max(jnp.where(visible, index + 1, 0), axis)
    return jnp.minimum(jnp.min(jnp.where(visible, index, count), axis), stop), stop


def _ranges(visible: jax.Array, full: jax.Array, axis: int) -> jax.Array:
    """From bool arrays [q blocks, kv blocks, B]. Written as reductions, which XLA fuses with their operands: the array
    of all pairs of blocks is never materialised. For a million tokens it would have 250 million elements."""
    count = visible.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, visible.shape, axis)
    start, stop = _range(visible, axis)
    full_start = jnp.minimum(jnp.min(jnp.where(full, index, count), axis), stop)
    after_full = ~full & (index > jnp.expand_dims(full_start, axis))
    full_stop = jnp.minimum(jnp.min(jnp.where(after_full, index, count), axis), stop)
    return jnp.stack([start, full_start, full_stop, stop], -1).swapaxes(0, 1)
