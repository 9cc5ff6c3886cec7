"""How rows are cut into blocks, and which blocks may see each other: what every blockwise computation shares."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest


class Tokens(NamedTuple):
    """Positions and segments of one side, in blocks: int32 [n, B, tokens of a block]."""

    positions: jax.Array
    segments: jax.Array


class Rows(NamedTuple):
    """What a batch's tokens say, apart from their values: who they are, and which blocks may see each other.

    `slopes` [K,R]: of each row of a product, where scores have biases by distance.
    """

    queries: Tokens
    keys: Tokens
    seen: jax.Array
    slopes: jax.Array | None = None


def sizes(request: AttentionRequest) -> tuple[int, int]:
    """Tokens in a block of queries and in a block of keys.

    On CPU blocks of 64 keep a block's scores in the cache and fit a packed row's documents closely (measured in
    benchmarks/cpu_kernels). Elsewhere a step of a loop costs more than its memory, so blocks are larger (not measured).
    """
    block = 64 if request.platform == "cpu" else 256
    return min(block, request.q_length), min(block, request.kv_length)


def q_tokens(request: AttentionRequest, inputs: AttentionInputs) -> Tokens:
    return token_blocks(inputs.q_positions, inputs.q_segments, sizes(request)[0])


def kv_tokens(request: AttentionRequest, inputs: AttentionInputs) -> Tokens:
    return token_blocks(inputs.kv_positions, inputs.kv_segments, sizes(request)[1])


def token_blocks(positions: jax.Array, segments: jax.Array, block: int) -> Tokens:
    padded = _padded(positions, block), _padded(segments, block)
    return Tokens(*(x.reshape(x.shape[0], -1, block).swapaxes(0, 1) for x in padded))


def rows_of(inputs: AttentionInputs, request: AttentionRequest) -> Rows:
    return meeting(request, q_tokens(request, inputs), kv_tokens(request, inputs), inputs.slopes)


def meeting(request: AttentionRequest, queries: Tokens, keys: Tokens, slopes: jax.Array | None = None) -> Rows:
    """The rows of one product: a block of queries is a row of it for each query head of a key head."""
    seen, each = any_visible(queries, keys, request.window), request.heads // request.kv_heads
    if slopes is not None:
        slopes = jnp.repeat(slopes.reshape(request.kv_heads, each), sizes(request)[0], axis=1)
    return Rows(Tokens(*(jnp.tile(x, each) for x in queries)), keys, seen, slopes)


def any_visible(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """`visible_blocks` of any row: bool [q blocks, kv blocks]."""
    return visible_blocks(queries, keys, window).any(-1)


def visible_blocks(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """False where no token of a block of queries sees any of a block of keys of its row: bool [q blocks, kv blocks, B].

    Judged by the ranges of segments and positions in a block, so True may be said too often and False never. Where a
    token sees another, its (segment, position) is not less; so the greatest of a block of queries must not be less
    than the least of a block of keys. For rows whose segments rise this is the diagonal, in whatever order a row is
    held (a ring's devices hold rows in a balanced order).
    """
    q_low, q_high, q_first, q_last, _, q_greatest = (bound[:, None] for bound in _ranges(queries))
    kv_low, kv_high, kv_first, kv_last, kv_least, _ = (bound[None] for bound in _ranges(keys))
    seen = (q_low <= kv_high) & (kv_low <= q_high) & (q_last >= kv_first)
    seen &= (q_high > kv_low) | (q_greatest >= kv_least)
    if window is not None:
        seen &= q_first - kv_last < window
    return seen


def wholly_visible(queries: Tokens, keys: Tokens, window: int | None) -> jax.Array:
    """True where every token of a block of queries sees every one of a block of keys: bool [q blocks, kv blocks, B].

    Here False may be said too often and True never.
    """
    q_first, q_last, kv_first, kv_last = (
        bound(tokens.positions, -1) for tokens in (queries, keys) for bound in (jnp.min, jnp.max)
    )
    q_one, kv_one = _only_segment(queries)[:, None], _only_segment(keys)[None]
    seen = (q_one == kv_one) & (q_one > 0) & (q_first[:, None] >= kv_last[None])
    if window is not None:
        seen &= q_last[:, None] - kv_first[None] < window
    return seen


def _ranges(tokens: Tokens) -> tuple[jax.Array, ...]:
    """For each block, padding apart: least and greatest segment, least and greatest position, the least position of the
    least segment and the greatest position of the greatest segment. int32 [n, B] each."""
    # A block of padding alone gets an empty range of segments, which overlaps none. Small enough to be subtracted.
    far = jnp.int32(2**30)
    positions, segments = tokens
    real = segments != 0
    low, high = jnp.where(real, segments, far).min(-1), jnp.where(real, segments, -far).max(-1)
    return (
        low,
        high,
        jnp.where(real, positions, far).min(-1),
        jnp.where(real, positions, -far).max(-1),
        jnp.where(segments == low[..., None], positions, far).min(-1),
        jnp.where(segments == high[..., None], positions, -far).max(-1),
    )


def _only_segment(tokens: Tokens) -> jax.Array:
    """For each block the segment that all its tokens are of, 0 where there is none: int32 [n, B]."""
    low, high = tokens.segments.min(-1), tokens.segments.max(-1)
    return jnp.where(low == high, low, 0)


def bounds(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each row of a bool [n, m]: the first True, and one past the last (0 and 0 where there is none)."""
    some = seen.any(1)
    start = jnp.where(some, jnp.argmax(seen, 1), 0)
    stop = jnp.where(some, seen.shape[1] - jnp.argmax(seen[:, ::-1], 1), 0)
    return start, stop


def at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def add_at(x: jax.Array, index: jax.Array, more: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, at(x, index) + more, index, 0)


def _padded(x: jax.Array, block: int) -> jax.Array:
    """Axis 1 filled with zeros to a multiple of `block`: padding tokens have segment 0, which nobody sees."""
    missing = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def q_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    """[B,T,H,h] to [n, B,K,R,h]: the query heads of a key head share its products as G * block rows."""
    block, K = sizes(request)[0], request.kv_heads
    x = _padded(x, block)
    B, T, H, h = x.shape
    x = x.reshape(B, T // block, block, K, H // K, h).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(T // block, B, K, H // K * block, h)


def from_q_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    n, B, K, R, h = x.shape
    block = sizes(request)[0]
    x = x.reshape(n, B, K, R // block, block, h).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, n * block, K * R // block, h)[:, : request.q_length]


def kv_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    """[B,S,K,h] to [n, B,K,block,h]."""
    block = sizes(request)[1]
    x = _padded(x, block)
    B, S, K, h = x.shape
    return x.reshape(B, S // block, block, K, h).transpose(1, 0, 3, 2, 4)


def from_kv_blocks(request: AttentionRequest, x: jax.Array) -> jax.Array:
    n, B, K, block, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, n * block, K, h)[:, : request.kv_length]
