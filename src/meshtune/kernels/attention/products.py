"""The products of blockwise attention, for queries and keys already in blocks (FlashAttention-2, arXiv:2307.08691).

One online softmax forward and one backward pass, both able to go on from what other keys have given: a device alone
calls them once for all keys, a ring of devices once for each shard of keys that comes by.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.blocks import (
    Rows,
    Tokens,
    add_at,
    at,
    bounds,
    from_kv_blocks,
    from_q_blocks,
    kv_blocks,
    q_blocks,
)
from meshtune.kernels.attention.request import AttentionRequest
from meshtune.kernels.attention.visibility import (
    LOWEST,
    MASKED,
    accumulator,
    biased,
    capped,
    capped_slope,
    exact,
    visible,
)

# Names a rematerialisation policy may save: with them the forward pass is not run again.
OUTPUT, LOG_SUM_EXP = "attention_output", "attention_log_sum_exp"


class Running(NamedTuple):
    """An online softmax under way: greatest score and sum of weights [..., R], weighted values [..., R, h]."""

    top: jax.Array
    total: jax.Array
    values: jax.Array


def nothing_yet(q: jax.Array) -> Running:
    """The softmax of queries [..., R, h] over no keys at all."""
    dtype, rows = accumulator(q.dtype), q.shape[:-1]
    return Running(jnp.full(rows, LOWEST, dtype), jnp.zeros(rows, dtype), jnp.zeros(q.shape, dtype))


def add_keys(
    request: AttentionRequest, running: Running, q_i, tokens_i: Tokens, k, v, keys: Tokens, start, stop, slopes=None
) -> Running:
    """`running` of one block of queries [B,K,R,h] after it has seen key blocks start..stop of k, v [m, B,K,block,h]."""

    def one_kv_block(j, running: Running):
        top, total, values = running
        scores = _scores(request, "bkrh,bksh->bkrs", q_i, at(k, j))
        keys_j = at(keys, j)
        scores = biased(scores, slopes, tokens_i.positions, keys_j.positions)
        scores = jnp.where(_seen(request, tokens_i, keys_j), scores, MASKED)
        new_top = jnp.maximum(top, _greatest(request, scores))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        total = total * fade + _sum(request, weights)
        values = values * fade[..., None] + _product("bkrs,bksh->bkrh", weights.astype(v.dtype), at(v, j))
        return Running(new_top, total, values)

    return jax.lax.fori_loop(start, stop, one_kv_block, running)


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """The output [..., R, h] and the log-sum-exp of scores [..., R]; 0 and 0 for a row that saw nothing."""
    top, total, values = running
    nothing = total == 0.0
    total = jnp.where(nothing, 1.0, total)
    return values / total[..., None], jnp.where(nothing, 0.0, top + jnp.log(total))


def forward(request: AttentionRequest, q, k, v, rows: Rows):
    """The output [B,T,H,h] over all keys, and the log-sum-exp of every row of scores in blocks [n, B,K,R]."""
    q, k, v = q_blocks(request, q), kv_blocks(request, k), kv_blocks(request, v)

    def one_q_block(_, this):
        q_i, tokens_i, start, stop = this
        running = add_keys(request, nothing_yet(q_i), q_i, tokens_i, k, v, rows.keys, start, stop, rows.slopes)
        out, log_sum_exp = finish(running)
        return None, (out.astype(q.dtype), log_sum_exp)

    _, (out, log_sum_exp) = jax.lax.scan(one_q_block, None, (q, rows.queries, *bounds(rows.seen)))
    return from_q_blocks(request, out), log_sum_exp


def backward(request: AttentionRequest, q, k, v, rows: Rows, out, log_sum_exp, d_out, kv_dtype):
    """Gradients of q in its own dtype, and of k and v in `kv_dtype`."""
    delta = q_blocks(request, output_slope(out, d_out))[..., 0]
    queries, d_out = q_blocks(request, q), q_blocks(request, d_out)
    keys = kv_blocks(request, k), kv_blocks(request, v)
    dq = jnp.zeros(queries.shape, accumulator(q.dtype))
    dq, (dk, dv) = gradients(request, queries, d_out, log_sum_exp, delta, *keys, rows, dq, kv_dtype)
    return from_q_blocks(request, dq).astype(q.dtype), from_kv_blocks(request, dk), from_kv_blocks(request, dv)


def output_slope(out: jax.Array, d_out: jax.Array) -> jax.Array:
    """delta: the sum over keys of weight times its gradient, which is that over h of output times gradient. [...,1]"""
    dtype = accumulator(out.dtype)
    return jnp.sum(out.astype(dtype) * d_out.astype(dtype), -1, keepdims=True)


def gradients(request: AttentionRequest, q, d_out, log_sum_exp, delta, k, v, rows: Rows, dq, kv_dtype):
    """`dq` with these keys' share added, and the gradients of these keys and values in `kv_dtype`. All in blocks.

    Weights are made again from the log-sum-exp over all keys, so k and v may be a part of them. The inner loop goes
    over keys, the smaller side where query heads share them. Blocks are held as [keys, queries], so that of the five
    products only one has a factor to turn.
    """
    dtype = accumulator(q.dtype)

    def one_q_block(d_keys, this):
        q_i, d_out_i, log_sum_exp_i, delta_i, tokens_i, dq_i, start, stop = this

        def one_kv_block(j, running):
            dk, dv, dq_i = running
            k_j, v_j = at(k, j), at(v, j)
            scores = _scores(request, "bksh,bkrh->bksr", k_j, q_i)
            keys_j = at(rows.keys, j)
            seen = _seen(request, tokens_i, keys_j).swapaxes(2, 3)
            moved = biased(scores.swapaxes(2, 3), rows.slopes, tokens_i.positions, keys_j.positions).swapaxes(2, 3)
            weights = jnp.exp(jnp.where(seen, moved, MASKED) - log_sum_exp_i[:, :, None, :])
            d_weights = _product("bksh,bkrh->bksr", v_j, d_out_i)
            d_scores = weights * (d_weights - delta_i[:, :, None, :])
            if request.softcap is not None:
                d_scores = d_scores * capped_slope(scores, request.softcap)
            d_scores = (d_scores * request.scale).astype(q.dtype)
            dv = add_at(dv, j, _product("bksr,bkrh->bksh", weights.astype(v.dtype), d_out_i))
            dk = add_at(dk, j, _product("bksr,bkrh->bksh", d_scores, q_i))
            return dk, dv, dq_i + _product("bksr,bksh->bkrh", d_scores, k_j)

        dk, dv, dq_i = jax.lax.fori_loop(start, stop, one_kv_block, (*d_keys, dq_i))
        return (dk, dv), dq_i

    empty = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    blocks = q, d_out, log_sum_exp, delta, rows.queries, dq, *bounds(rows.seen)
    (dk, dv), dq = jax.lax.scan(one_q_block, empty, blocks)
    return dq, (dk.astype(kv_dtype), dv.astype(kv_dtype))


def _product(equation: str, x, y):
    return jnp.einsum(equation, x, y, precision=exact(x.dtype), preferred_element_type=accumulator(x.dtype))


def _scores(request: AttentionRequest, equation: str, x, y):
    return capped(_product(equation, x, y) * request.scale, request.softcap)


def _greatest(request: AttentionRequest, scores: jax.Array) -> jax.Array:
    """The greatest of each row.

    XLA's loop for CPUs goes number by number for `max`, which has to pass NaN on; this does several at once and leaves
    NaN to the exponential, which passes it on as well (measured in benchmarks/cpu_kernels).
    """
    if request.platform != "cpu":
        return scores.max(-1)
    least = jnp.array(-jnp.inf, scores.dtype)
    return jax.lax.reduce(scores, least, lambda a, b: jnp.where(a > b, a, b), (scores.ndim - 1,))


def _sum(request: AttentionRequest, weights: jax.Array) -> jax.Array:
    """The sum of each row: on CPU as a product with ones, which takes several numbers at once, too."""
    if request.platform != "cpu":
        return weights.sum(-1)
    return _product("bkrs,s->bkr", weights, jnp.ones(weights.shape[-1], weights.dtype))


def _seen(request: AttentionRequest, queries: Tokens, keys: Tokens):
    """Who sees whom in one block: bool [B,1,R,s]."""
    return visible(queries.positions, keys.positions, queries.segments, keys.segments, request.window)[:, None]
