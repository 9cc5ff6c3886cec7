"""Attention block by block with an online softmax: no T x S array, forward or backward, on any platform XLA serves.

FlashAttention-2 (arXiv:2307.08691) in plain XLA. The forward pass saves only the output and each row's log-sum-exp;
the backward pass makes every block of weights again from them. Blocks that nobody can see (above the diagonal of an
aligned row, of other documents of a packed row, outside the window) are skipped while running: the loops are bounded
by what the segments and positions of this batch allow.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.attention.visibility import LOWEST, MASKED, capped, capped_slope, exact, visible

# Names a rematerialisation policy may save: with them the forward pass is not run again.
OUTPUT, LOG_SUM_EXP = "attention_output", "attention_log_sum_exp"


class Tokens(NamedTuple):
    """Positions and segments of one side, in blocks: int32 [n, B, tokens of a block]."""

    positions: jax.Array
    segments: jax.Array


class Rows(NamedTuple):
    """What a batch's tokens say, apart from their values: who they are, and which blocks may see each other."""

    queries: Tokens
    keys: Tokens
    seen: jax.Array


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with float32 scores and sums; first derivatives only. [B,T,H,h] in q's dtype."""
    q_block, kv_block = sizes(request)
    queries = Tokens(*(_token_blocks(x, q_block) for x in (inputs.q_positions, inputs.q_segments)))
    keys = Tokens(*(_token_blocks(x, kv_block) for x in (inputs.kv_positions, inputs.kv_segments)))
    seen = any_visible(queries, keys, request.window, request.aligned)
    # A block of queries is a row of a product for each query head of a key head.
    queries = Tokens(*(jnp.tile(x, request.heads // request.kv_heads) for x in queries))
    return _attend(request, inputs.q, inputs.k, inputs.v, Rows(queries, keys, seen))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(request: AttentionRequest, q, k, v, rows: Rows):
    return _forward(request, q, k, v, rows)[0]


def _attend_forward(request: AttentionRequest, q, k, v, rows: Rows):
    out, log_sum_exp = _forward(request, q, k, v, rows)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (q, k, v, rows, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, saved, d_out):
    q, k, v, rows, out, log_sum_exp = saved
    return *_backward(request, q, k, v, rows, out, log_sum_exp, d_out), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(request: AttentionRequest, q, k, v, rows: Rows):
    """The output [B,T,H,h], and the log-sum-exp of every row of scores in blocks: float32 [n, B,K,R]."""
    q, k, v = _q_blocks(request, q), _kv_blocks(request, k), _kv_blocks(request, v)
    starts, stops = bounds(rows.seen)
    BKR, h = q.shape[1:4], q.shape[4]

    def one_q_block(_, this):
        q_i, tokens_i, start, stop = this

        def one_kv_block(j, running):
            top, total, out = running
            scores = _scores(request, "bkrh,bksh->bkrs", q_i, _at(k, j))
            scores = jnp.where(_seen(request, tokens_i, _at(rows.keys, j)), scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            fade = jnp.exp(top - new_top)
            total = total * fade + weights.sum(-1)
            out = out * fade[..., None] + _product("bkrs,bksh->bkrh", weights.astype(v.dtype), _at(v, j))
            return new_top, total, out

        empty = (jnp.full(BKR, LOWEST), jnp.zeros(BKR), jnp.zeros((*BKR, h)))
        top, total, out = jax.lax.fori_loop(start, stop, one_kv_block, empty)
        nothing = total == 0.0
        total = jnp.where(nothing, 1.0, total)
        log_sum_exp = jnp.where(nothing, 0.0, top + jnp.log(total))
        return None, ((out / total[..., None]).astype(q.dtype), log_sum_exp)

    _, (out, log_sum_exp) = jax.lax.scan(one_q_block, None, (q, rows.queries, starts, stops))
    return _from_q_blocks(request, out), log_sum_exp


def _backward(request: AttentionRequest, q, k, v, rows: Rows, out, log_sum_exp, d_out):
    """Gradients of q, k and v, each in its own dtype.

    Blocks are held as [keys, queries], so that of the five products only one has a factor to turn.
    """
    dtypes = q.dtype, k.dtype, v.dtype
    # Sum over keys of weight times its gradient, which is the same as that of the output and its gradient.
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1, keepdims=True)
    delta = _q_blocks(request, delta)[..., 0]
    q, k, v = _q_blocks(request, q), _kv_blocks(request, k), _kv_blocks(request, v)
    d_out = _q_blocks(request, d_out)
    starts, stops = bounds(rows.seen.T)

    def one_kv_block(dq, this):
        k_j, v_j, tokens_j, start, stop = this

        def one_q_block(i, running):
            dq, dk, dv = running
            q_i, d_out_i = _at(q, i), _at(d_out, i)
            scores = _scores(request, "bksh,bkrh->bksr", k_j, q_i)
            seen = _seen(request, _at(rows.queries, i), tokens_j).swapaxes(2, 3)
            weights = jnp.exp(jnp.where(seen, scores, MASKED) - _at(log_sum_exp, i)[:, :, None, :])
            d_weights = _product("bksh,bkrh->bksr", v_j, d_out_i)
            d_scores = weights * (d_weights - _at(delta, i)[:, :, None, :])
            if request.softcap is not None:
                d_scores = d_scores * capped_slope(scores, request.softcap)
            d_scores = (d_scores * request.scale).astype(q.dtype)
            dv = dv + _product("bksr,bkrh->bksh", weights.astype(v.dtype), d_out_i)
            dk = dk + _product("bksr,bkrh->bksh", d_scores, q_i)
            dq_i = _at(dq, i) + _product("bksr,bksh->bkrh", d_scores, k_j)
            return jax.lax.dynamic_update_index_in_dim(dq, dq_i, i, 0), dk, dv

        empty = jnp.zeros(k_j.shape), jnp.zeros(v_j.shape)
        dq, dk, dv = jax.lax.fori_loop(start, stop, one_q_block, (dq, *empty))
        return dq, (dk.astype(dtypes[1]), dv.astype(dtypes[2]))

    dq, (dk, dv) = jax.lax.scan(one_kv_block, jnp.zeros(q.shape), (k, v, rows.keys, starts, stops))
    return _from_q_blocks(request, dq).astype(dtypes[0]), _from_kv_blocks(request, dk), _from_kv_blocks(request, dv)


def _product(equation: str, x, y):
    return jnp.einsum(equation, x, y, precision=exact(x.dtype), preferred_element_type=jnp.float32)


def _scores(request: AttentionRequest, equation: str, x, y):
    return capped(_product(equation, x, y) * request.scale, request.softcap)


def _seen(request: AttentionRequest, queries: Tokens, keys: Tokens):
    """Who sees whom in one block: bool [B,1,R,s]."""
    return visible(queries.positions, keys.positions, queries.segments, keys.segments, request.window)[:, None]


def any_visible(queries: Tokens, keys: Tokens, window: int | None, aligned: bool):
    """False where no token of a block of queries sees any of a block of keys, in any row: bool [q blocks, kv blocks].

    Judged by the ranges of segments and positions in a block, so True may be said too often and False never.
    """
    q_low, q_high, q_first, q_last = (bound[:, None] for bound in _ranges(queries))
    kv_low, kv_high, kv_first, kv_last = (bound[None] for bound in _ranges(keys))
    seen = (q_low <= kv_high) & (kv_low <= q_high) & (q_last >= kv_first)
    if window is not None:
        seen &= q_first - kv_last < window
    seen = seen.any(-1)
    if aligned:
        (n, _, q_block), (m, _, kv_block) = queries.segments.shape, keys.segments.shape
        seen &= ((jnp.arange(n) + 1) * q_block)[:, None] > jnp.arange(m) * kv_block
    return seen


def _ranges(tokens: Tokens):
    """Least and greatest segment, least and greatest position of each block, padding apart: int32 [n, B] each."""
    # A block of padding alone gets an empty range of segments, which overlaps none. Small enough to be subtracted.
    far = jnp.int32(2**30)
    real = tokens.segments != 0
    return (
        jnp.where(real, tokens.segments, far).min(-1),
        jnp.where(real, tokens.segments, -far).max(-1),
        jnp.where(real, tokens.positions, far).min(-1),
        jnp.where(real, tokens.positions, -far).max(-1),
    )


def bounds(seen):
    """For each row of a bool [n, m]: the first True, and one past the last (0 and 0 where there is none)."""
    some = seen.any(1)
    start = jnp.where(some, jnp.argmax(seen, 1), 0)
    stop = jnp.where(some, seen.shape[1] - jnp.argmax(seen[:, ::-1], 1), 0)
    return start, stop


def sizes(request: AttentionRequest) -> tuple[int, int]:
    """Tokens in a block of queries and in a block of keys.

    On CPU blocks of 64 keep a block's scores in the cache and fit a packed row's documents closely (measured in
    benchmarks/cpu_kernels). Elsewhere a step of a loop costs more than its memory, so blocks are larger (not measured).
    """
    block = 64 if request.platform == "cpu" else 256
    return min(block, request.q_length), min(block, request.kv_length)


def _at(tree, index):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _padded(x, block: int):
    """Axis 1 filled with zeros to a multiple of `block`: padding tokens have segment 0, which nobody sees."""
    missing = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def _token_blocks(x, block: int):
    x = _padded(x, block)
    return x.reshape(x.shape[0], -1, block).swapaxes(0, 1)


def _q_blocks(request: AttentionRequest, x):
    """[B,T,H,h] to [n, B,K,R,h]: the query heads of a key head share its products as G * block rows."""
    block, K = sizes(request)[0], request.kv_heads
    x = _padded(x, block)
    B, T, H, h = x.shape
    x = x.reshape(B, T // block, block, K, H // K, h).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(T // block, B, K, H // K * block, h)


def _from_q_blocks(request: AttentionRequest, x):
    n, B, K, R, h = x.shape
    block = sizes(request)[0]
    x = x.reshape(n, B, K, R // block, block, h).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, n * block, K * R // block, h)[:, : request.q_length]


def _kv_blocks(request: AttentionRequest, x):
    """[B,S,K,h] to [n, B,K,block,h]."""
    block = sizes(request)[1]
    x = _padded(x, block)
    B, S, K, h = x.shape
    return x.reshape(B, S // block, block, K, h).transpose(1, 0, 3, 2, 4)


def _from_kv_blocks(request: AttentionRequest, x):
    n, B, K, block, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, n * block, K, h)[:, : request.kv_length]


BLOCKWISE = Backend("blockwise", run)
