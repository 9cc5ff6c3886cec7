"""Attention that holds all scores at once: the least work for short rows, T x S memory for long ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.attention.visibility import MASKED, capped, visible

LONGEST_AREA = 256 * 256


def suits(request: AttentionRequest) -> str | None:
    """Short rows, and decoding (few queries against a cache)."""
    if request.q_length * request.kv_length > LONGEST_AREA:
        return f"{request.q_length} x {request.kv_length} scores a head are more than {LONGEST_AREA}"
    return None


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with float32 scores; JAX differentiates it. [B,T,H,h] in q's dtype."""
    B, T, H, h = inputs.q.shape
    K = inputs.k.shape[2]
    q = inputs.q.reshape(B, T, K, H // K, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, inputs.k, preferred_element_type=jnp.float32)
    scores = capped(scores * request.scale, request.softcap)
    seen = visible(inputs.q_positions, inputs.kv_positions, inputs.q_segments, inputs.kv_segments, request.window)[
        :, None, None
    ]
    scores = jnp.where(seen, scores, MASKED)
    # The greatest score only shifts the exponent: its gradient cancels, so it need not be computed.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    # Where nothing is seen every score equals the top, and exp gives 1: hence the second mask.
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(inputs.v.dtype), inputs.v, preferred_element_type=jnp.float32)
    return out.reshape(B, T, H, h).astype(inputs.q.dtype)


DIRECT = Backend("direct", run, suits=suits)
