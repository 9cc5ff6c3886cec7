"""Attention that materialises all scores: the fastest for short rows, but T x S memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.kernels.attention.backend import (
    LOWEST,
    MASKED,
    AttentionInputs,
    AttentionRequest,
    Backend,
    accumulator,
    alibi_biased,
    cap_scores,
    matmul_precision,
    visible,
)
from meshtune.translatable import Translatable

# Measured on CPU, forward and backward (benchmarks/cpu_kernels): at 64 x 64 direct takes two fifths of the time of
# blockwise, at 128 x 128 they are equal, at 256 x 256 blockwise is faster. At 128 x 128 the scores saved for the
# backward pass are about as large as the queries themselves (T against h numbers per token and head).
LARGEST_AREA = 128 * 128
# With so few queries the scores are smaller than the keys: with any cache direct needs as little memory, and is faster.
FEW_QUERIES = 8


def suits(request: AttentionRequest) -> str | None:
    """Short rows, and decoding (few queries with a cache)."""
    if request.q_length > FEW_QUERIES and request.q_length * request.kv_length > LARGEST_AREA:
        return Translatable(
            "{queries} x {keys} scores per head would be materialised (more than {most})",
            queries=request.q_length,
            keys=request.kv_length,
            most=LARGEST_AREA,
        )
    return None


def _add_sinks(
    sinks: jax.Array, maximum: jax.Array, weights: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights and their total where every softmax has one more score, that of its head without a value."""
    K, rows = weights.shape[1:3]
    sinks = jnp.repeat(sinks.astype(total.dtype).reshape(K, -1), K * rows // sinks.size, axis=1)[..., None]
    larger = jnp.maximum(maximum, jax.lax.stop_gradient(sinks))
    return weights * jnp.exp(maximum - larger), total * jnp.exp(maximum - larger) + jnp.exp(sinks - larger)


def _scores(
    q: Float[Array, "B K r h"], k: Float[Array, "B K S h"], request: AttentionRequest
) -> Float[Array, "B K r S"]:
    """The products of queries and keys, in the dtype of the accumulator."""
    options = {"precision": matmul_precision(q.dtype), "preferred_element_type": accumulator(q.dtype)}
    if request.platform != "cpu" or request.q_length > 1:
        return jnp.einsum("bkrh,bksh->bkrs", q, k, **options)
    # XLA's product for CPUs copies its right factor into another order, so one token's queries are that factor, and
    # not all keys of the past. The barriers keep XLA from exchanging the factors.
    (B, K, S, h), r = k.shape, q.shape[2]
    queries = jax.lax.optimization_barrier(q.reshape(B * K, r, h).swapaxes(1, 2))
    by_key = jax.lax.dot_general(k.reshape(B * K, S, h), queries, (((2,), (1,)), ((0,), (0,))), **options)
    return jax.lax.optimization_barrier(by_key).reshape(B, K, S, r).swapaxes(2, 3)


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with float32 scores, differentiated by JAX. [B,T,H,h] in q's dtype."""
    B, T, H, h = inputs.q.shape
    K, G = request.kv_heads, request.heads // request.kv_heads
    sum_dtype = accumulator(inputs.q.dtype)
    # Batch axes first, and the query heads of a key head as rows of one matmul, so that no matmul needs a transpose.
    q = inputs.q.reshape(B, T, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, h)
    k, v = inputs.k.transpose(0, 2, 1, 3), inputs.v.transpose(0, 2, 1, 3)
    scores = _scores(q, k, request) * request.scale
    if request.softcap is not None:
        scores = cap_scores(scores, request.softcap)
    positions, segments = jnp.tile(inputs.q_positions, G), jnp.tile(inputs.q_segments, G)
    if inputs.slopes is not None:
        slopes = jnp.repeat(inputs.slopes.reshape(K, G), T, axis=1)
        scores = alibi_biased(scores, slopes, positions, inputs.kv_positions)
    parents = None if inputs.q_parents is None else jnp.tile(inputs.q_parents, G)
    reach = None if inputs.q_reach is None else jnp.tile(inputs.q_reach, G)
    is_visible = visible(positions, inputs.kv_positions, segments, inputs.kv_segments, request, parents, reach)
    scores = jnp.where(is_visible[:, None], scores, MASKED)
    # The maximum only shifts the exponents: its gradient is zero, and need not be computed.
    maximum = jnp.maximum(jax.lax.stop_gradient(scores.max(-1, keepdims=True)), LOWEST)
    weights = jnp.exp(scores - maximum)
    total = weights.sum(-1, keepdims=True)
    if inputs.sinks is not None:
        weights, total = _add_sinks(inputs.sinks, maximum, weights, total)
    # Rows that see nothing have a total of 0 and give 0. Dividing after the matmul touches h values per row, not S.
    weights, precision = weights.astype(v.dtype), matmul_precision(v.dtype)
    out = jnp.einsum("bkrs,bksh->bkrh", weights, v, precision=precision, preferred_element_type=sum_dtype)
    out = out / jnp.where(total == 0.0, 1.0, total)
    return out.reshape(B, K, G, T, h).transpose(0, 3, 1, 2, 4).reshape(B, T, H, h).astype(inputs.q.dtype)


DIRECT = Backend("direct", run, suits=suits)
