"""Attention block by block with an online softmax: no T x S array, forward or backward, on any platform XLA serves.

The forward pass saves only the output and each row's log-sum-exp; the backward pass makes every block of weights again
from them. Blocks that nobody can see (above the diagonal of a row, of other documents of a packed row, outside the
window) are skipped while running: the loops are bounded by what the segments and positions of this batch allow.
"""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from meshtune.kernels.attention import ring
from meshtune.kernels.attention.blocks import Rows, rows_of
from meshtune.kernels.attention.products import LOG_SUM_EXP, OUTPUT, backward, forward
from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with scores and sums in float32 (float64 for float64); first derivatives only. [B,T,H,h]."""
    return _attend(request, inputs.q, inputs.k, inputs.v, rows_of(inputs, request))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(request: AttentionRequest, q, k, v, rows: Rows):
    return forward(request, q, k, v, rows)[0]


def _attend_forward(request: AttentionRequest, q, k, v, rows: Rows):
    out, log_sum_exp = forward(request, q, k, v, rows)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (q, k, v, rows, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, saved, d_out):
    q, k, v, rows, out, log_sum_exp = saved
    return *backward(request, q, k, v, rows, out, log_sum_exp, d_out, k.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


BLOCKWISE = Backend("blockwise", run, over_mesh=ring.run)
