"""Attention that holds all scores at once: the least work for short rows, T x S memory for long ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.attention.visibility import LOWEST, MASKED, accumulator, biased, capped, exact, visible

# Measured on CPU, both ways (benchmarks/cpu_kernels): at 64 x 64 direct takes two fifths of blockwise's time,
# at 128 x 128 they are level, at 256 x 256 blockwise is ahead. At 128 x 128 the scores kept for the backward pass are
# still of the size of the queries themselves (T against h numbers a token and head).
LARGEST_AREA = 128 * 128
# So few queries have fewer scores than the keys have numbers: against any cache direct is as small, and faster.
FEW_QUERIES = 8


def suits(request: AttentionRequest) -> str | None:
    """Short rows, and decoding (few queries against a cache)."""
    if request.q_length > FEW_QUERIES and request.q_length * request.kv_length > LARGEST_AREA:
        return f"{request.q_length} x {request.kv_length} scores a head would be held (more than {LARGEST_AREA})"
    return None


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with float32 scores; JAX differentiates it. [B,T,H,h] in q's dtype."""
    B, T, H, h = inputs.q.shape
    K, G = request.kv_heads, request.heads // request.kv_heads
    sums = accumulator(inputs.q.dtype)
    # Batch axes first and the query heads of a key head as rows of one product: no product has an axis to move.
    q = inputs.q.reshape(B, T, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, h)
    k, v = inputs.k.transpose(0, 2, 1, 3), inputs.v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkrh,bksh->bkrs", q, k, precision=exact(q.dtype), preferred_element_type=sums)
    scores = capped(scores * request.scale, request.softcap)
    slopes = None if inputs.slopes is None else jnp.repeat(inputs.slopes.reshape(K, G), T, axis=1)
    scores = biased(scores, slopes, jnp.tile(inputs.q_positions, G), inputs.kv_positions)
    seen = visible(
        jnp.tile(inputs.q_positions, G),
        inputs.kv_positions,
        jnp.tile(inputs.q_segments, G),
        inputs.kv_segments,
        request.window,
    )[:, None]
    scores = jnp.where(seen, scores, MASKED)
    # The greatest score only shifts the exponent: its gradient cancels, so it need not be computed.
    top = jnp.maximum(jax.lax.stop_gradient(scores.max(-1, keepdims=True)), LOWEST)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    # Rows that see nothing sum to 0 and give 0; dividing after the product touches h values a row and not S.
    out = jnp.einsum(
        "bkrs,bksh->bkrh", weights.astype(v.dtype), v, precision=exact(v.dtype), preferred_element_type=sums
    )
    out = out / jnp.where(total == 0.0, 1.0, total)
    return out.reshape(B, K, G, T, h).transpose(0, 3, 1, 2, 4).reshape(B, T, H, h).astype(inputs.q.dtype)


DIRECT = Backend("direct", run, suits=suits)
