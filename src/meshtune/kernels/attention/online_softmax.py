"""Blockwise attention by online softmax (FlashAttention-2, arXiv:2307.08691), and attention sinks.

Forward and backward can both continue from the results of other keys: a single device calls them once for all keys, a
ring of devices once for each shard of keys that arrives.

Attention sinks (https://arxiv.org/abs/2309.17453, as in gpt-oss): for each head a score that takes part in the
softmax and has no value.

A sink only changes what weights are divided by. So a kernel computes without it, and its output and log-sum-exp are
corrected afterwards; its backward pass is right without a change once it gets the corrected ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtune.kernels.attention.backend import (
    LOWEST,
    MASKED,
    AttentionRequest,
    accumulator,
    alibi_biased,
    cap_scores,
    capped_derivative,
    matmul_precision,
    visible,
)
from meshtune.kernels.attention.blocks import (
    BlockMask,
    TokenBlocks,
    Visits,
    add_to_block,
    from_kv_blocks,
    from_q_blocks,
    get_block,
    kv_blocks,
    q_blocks,
    rows_of_heads,
)

# Names for a rematerialisation policy: if both are saved, the forward pass is not run again.
OUTPUT, LOG_SUM_EXP = "attention_output", "attention_log_sum_exp"


class RunningSoftmax(NamedTuple):
    """The state of an online softmax: the maximum score and the sum of weights [..., R], and the weighted sum of values
    [..., R, h]."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def empty_softmax(q: jax.Array) -> RunningSoftmax:
    """The state for queries [..., R, h] before any key."""
    dtype, rows = accumulator(q.dtype), q.shape[:-1]
    return RunningSoftmax(jnp.full(rows, LOWEST, dtype), jnp.zeros(rows, dtype), jnp.zeros(q.shape, dtype))


def accumulate_keys(
    request: AttentionRequest,
    running: RunningSoftmax,
    q_i: jax.Array,
    tokens_i: TokenBlocks,
    k: jax.Array,
    v: jax.Array,
    keys: TokenBlocks,
    visits: Visits,
    slopes: jax.Array | None = None,
) -> RunningSoftmax:
    """Adds the key blocks `visits` of k and v [m, B,K,block,h] to the softmax of one query block q_i [B,K,R,h]."""

    def accumulate_block(number: jax.Array, running: RunningSoftmax) -> RunningSoftmax:
        maximum, total, values = running
        j = visits.key_block(number)
        scores = _scores(request, "bkrh,bksh->bkrs", q_i, get_block(k, j))
        keys_j = get_block(keys, j)
        scores = alibi_biased(scores, slopes, tokens_i.positions, keys_j.positions)
        scores = jnp.where(_visible(request, tokens_i, keys_j), scores, MASKED)
        new_maximum = jnp.maximum(maximum, _row_max(request, scores))
        weights = jnp.exp(scores - new_maximum[..., None])
        rescale = jnp.exp(maximum - new_maximum)
        total = total * rescale + _row_sum(request, weights)
        values = values * rescale[..., None] + _einsum("bkrs,bksh->bkrh", weights.astype(v.dtype), get_block(v, j))
        return RunningSoftmax(new_maximum, total, values)

    return jax.lax.fori_loop(visits.start, visits.stop, accumulate_block, running)


def finish(running: RunningSoftmax) -> tuple[jax.Array, jax.Array]:
    """The output [..., R, h] and the log-sum-exp of the scores [..., R]; both 0 for a row that sees nothing."""
    maximum, total, values = running
    sees_nothing = total == 0.0
    total = jnp.where(sees_nothing, 1.0, total)
    return values / total[..., None], jnp.where(sees_nothing, 0.0, maximum + jnp.log(total))


def forward(
    request: AttentionRequest, q: jax.Array, k: jax.Array, v: jax.Array, mask: BlockMask
) -> tuple[jax.Array, jax.Array]:
    """The output [B,T,H,h] over all keys, and the log-sum-exp of every row of scores in blocks [n, B,K,R]."""
    q, k, v = q_blocks(request, q), kv_blocks(request, k), kv_blocks(request, v)

    def attend_block(_, xs):
        q_i, tokens_i, visits = xs
        running = accumulate_keys(request, empty_softmax(q_i), q_i, tokens_i, k, v, mask.keys, visits, mask.slopes)
        out, log_sum_exp = finish(running)
        return None, (out.astype(q.dtype), log_sum_exp)

    _, (out, log_sum_exp) = jax.lax.scan(attend_block, None, (q, mask.queries, mask.visits))
    return from_q_blocks(request, out), log_sum_exp


def backward(
    request: AttentionRequest,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask,
    out: jax.Array,
    log_sum_exp: jax.Array,
    d_out: jax.Array,
    kv_dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q in its own dtype, and of k and v in `kv_dtype`."""
    delta = q_blocks(request, output_delta(out, d_out))[..., 0]
    queries, d_out = q_blocks(request, q), q_blocks(request, d_out)
    keys = kv_blocks(request, k), kv_blocks(request, v)
    dq = jnp.zeros(queries.shape, accumulator(q.dtype))
    dq, (dk, dv) = accumulate_grads(request, queries, d_out, log_sum_exp, delta, *keys, mask, dq, kv_dtype)
    return from_q_blocks(request, dq).astype(q.dtype), from_kv_blocks(request, dk), from_kv_blocks(request, dv)


def output_delta(out: jax.Array, d_out: jax.Array) -> jax.Array:
    """FlashAttention's delta [..., 1]: the sum over h of output times its gradient, which equals the sum over keys of
    weight times its gradient."""
    dtype = accumulator(out.dtype)
    return jnp.sum(out.astype(dtype) * d_out.astype(dtype), -1, keepdims=True)


def accumulate_grads(
    request: AttentionRequest,
    q: jax.Array,
    d_out: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask,
    dq: jax.Array,
    kv_dtype: DTypeLike,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`dq` plus the contribution of these keys, and the gradients of these keys and values in `kv_dtype`; in blocks.

    Weights are recomputed from the log-sum-exp over all keys, so k and v may be a shard of them. The inner loop runs
    over keys, which are the smaller side if query heads share them. Blocks of scores are laid out as [keys, queries],
    so that only one of the five matmuls has a transposed factor.
    """
    dtype = accumulator(q.dtype)

    def query_block_grads(d_keys, xs):
        q_i, d_out_i, log_sum_exp_i, delta_i, tokens_i, dq_i, visits = xs

        def key_block_grads(number, carry):
            dk, dv, dq_i = carry
            j = visits.key_block(number)
            k_j, v_j = get_block(k, j), get_block(v, j)
            scores = _scores(request, "bksh,bkrh->bksr", k_j, q_i)
            keys_j = get_block(mask.keys, j)
            is_visible = _visible(request, tokens_i, keys_j).swapaxes(2, 3)
            biased = alibi_biased(scores.swapaxes(2, 3), mask.slopes, tokens_i.positions, keys_j.positions)
            biased = biased.swapaxes(2, 3)
            weights = jnp.exp(jnp.where(is_visible, biased, MASKED) - log_sum_exp_i[:, :, None, :])
            d_weights = _einsum("bksh,bkrh->bksr", v_j, d_out_i)
            d_scores = weights * (d_weights - delta_i[:, :, None, :])
            if request.softcap is not None:
                d_scores = d_scores * capped_derivative(scores, request.softcap)
            d_scores = (d_scores * request.scale).astype(q.dtype)
            dv = add_to_block(dv, j, _einsum("bksr,bkrh->bksh", weights.astype(v.dtype), d_out_i))
            dk = add_to_block(dk, j, _einsum("bksr,bkrh->bksh", d_scores, q_i))
            return dk, dv, dq_i + _einsum("bksr,bksh->bkrh", d_scores, k_j)

        dk, dv, dq_i = jax.lax.fori_loop(visits.start, visits.stop, key_block_grads, (*d_keys, dq_i))
        return (dk, dv), dq_i

    zeros = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    blocks = q, d_out, log_sum_exp, delta, mask.queries, dq, mask.visits
    (dk, dv), dq = jax.lax.scan(query_block_grads, zeros, blocks)
    return dq, (dk.astype(kv_dtype), dv.astype(kv_dtype))


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, precision=matmul_precision(x.dtype), preferred_element_type=accumulator(x.dtype))


def _scores(request: AttentionRequest, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return cap_scores(_einsum(equation, x, y) * request.scale, request.softcap)


def _row_max(request: AttentionRequest, scores: jax.Array) -> jax.Array:
    """The maximum of each row.

    XLA does not vectorise `max` on CPUs, because it must propagate NaN. This reduction is vectorised and leaves NaN to
    the exponential, which propagates it as well (measured in benchmarks/cpu_kernels).
    """
    if request.platform != "cpu":
        return scores.max(-1)
    lowest = jnp.array(-jnp.inf, scores.dtype)
    return jax.lax.reduce(scores, lowest, lambda a, b: jnp.where(a > b, a, b), (scores.ndim - 1,))


def _row_sum(request: AttentionRequest, weights: jax.Array) -> jax.Array:
    """The sum of each row: on CPU as a matmul with ones, which is vectorised as well."""
    if request.platform != "cpu":
        return weights.sum(-1)
    return _einsum("bkrs,s->bkr", weights, jnp.ones(weights.shape[-1], weights.dtype))


def _visible(request: AttentionRequest, queries: TokenBlocks, keys: TokenBlocks) -> jax.Array:
    """Which query sees which key in one block of scores: bool [B,1,R,s]."""
    tokens = queries.positions, keys.positions, queries.segments, keys.segments
    return visible(*tokens, request, queries.parents, queries.reach)[:, None]


def in_blocks(
    request: AttentionRequest, out: jax.Array, log_sum_exp: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The output [B,T,H,h] and log-sum-exp, in blocks [n, B,K,R], with sinks [H] in the softmax."""
    if sinks is None:
        return out, log_sum_exp
    total = jnp.logaddexp(log_sum_exp, rows_of_heads(request, sinks.astype(log_sum_exp.dtype)))
    share = from_q_blocks(request, jnp.exp(log_sum_exp - total)[..., None])
    return (out * share).astype(out.dtype), total


def grads_in_blocks(
    request: AttentionRequest, sinks: jax.Array | None, out: jax.Array, log_sum_exp: jax.Array, d_out: jax.Array
) -> jax.Array | None:
    """The gradient [H] of sinks, from what `in_blocks` returned and the output's gradient."""
    if sinks is None:
        return None
    delta = q_blocks(request, output_delta(out, d_out))[..., 0]
    weights = jnp.exp(rows_of_heads(request, sinks.astype(delta.dtype)) - log_sum_exp)
    by_head = jnp.sum(weights * delta, (0, 1)).reshape(request.heads, -1)
    return -by_head.sum(-1).astype(sinks.dtype)


def by_head(out: jax.Array, log_sum_exp: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The same for a log-sum-exp [B,H,T padded]."""
    if sinks is None:
        return out, log_sum_exp
    total = jnp.logaddexp(log_sum_exp, sinks.astype(log_sum_exp.dtype)[:, None])
    share = jnp.exp(log_sum_exp - total)[:, :, : out.shape[1]].swapaxes(1, 2)[..., None]
    return (out * share).astype(out.dtype), total


def grads_by_head(sinks: jax.Array | None, log_sum_exp: jax.Array, delta: jax.Array) -> jax.Array | None:
    """The gradient [H] of sinks, from what `by_head` returned and FlashAttention's delta [B,H,T padded]."""
    if sinks is None:
        return None
    weights = jnp.exp(sinks.astype(delta.dtype)[:, None] - log_sum_exp)
    return -jnp.sum(weights * delta, (0, 2)).astype(sinks.dtype)
