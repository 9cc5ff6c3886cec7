"""Attention block by block with an online softmax: no T x S array, forward or backward, on any platform of XLA.

The forward pass saves only the output and each row's log-sum-exp, from which the backward pass recomputes the weights
of each block. Blocks that are entirely invisible (above the diagonal of a row, in other documents of a packed row, or
outside the window) are skipped at run time: the loops are bounded by the segments and positions of the batch.
"""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from meshtune.kernels.attention import online_softmax as with_sinks
from meshtune.kernels.attention.backend import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.attention.blocks import BlockMask, inputs_mask
from meshtune.kernels.attention.online_softmax import LOG_SUM_EXP, OUTPUT, backward, forward
from meshtune.lazy import LazyFunction


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with scores and sums in float32 (float64 for float64); first derivatives only. [B,T,H,h]."""
    return _attend(request, inputs.q, inputs.k, inputs.v, inputs.sinks, inputs_mask(request, inputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    request: AttentionRequest, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, mask: BlockMask
):
    return _attend_forward(request, q, k, v, sinks, mask)[0]


def _attend_forward(
    request: AttentionRequest, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, mask: BlockMask
):
    out, log_sum_exp = with_sinks.in_blocks(request, *forward(request, q, k, v, mask), sinks)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (q, k, v, sinks, mask, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, residuals, d_out: jax.Array):
    q, k, v, sinks, mask, out, log_sum_exp = residuals
    d_sinks = with_sinks.grads_in_blocks(request, sinks, out, log_sum_exp, d_out)
    return *backward(request, q, k, v, mask, out, log_sum_exp, d_out, k.dtype), d_sinks, None


_attend.defvjp(_attend_forward, _attend_backward)


BLOCKWISE = Backend("blockwise", run, run_sharded=LazyFunction("meshtune.kernels.attention.ring:run"))
