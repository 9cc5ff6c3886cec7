"""Attention sinks (https://arxiv.org/abs/2309.17453, as in gpt-oss): for each head a score that takes part in the
softmax and has no value.

A sink only changes what weights are divided by. So a kernel computes without it, and its output and log-sum-exp are
corrected afterwards; its backward pass is right without a change once it gets the corrected ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.backend import AttentionRequest
from meshtune.kernels.attention.blocks import from_q_blocks, q_blocks, rows_of_heads
from meshtune.kernels.attention.online_softmax import output_delta


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
