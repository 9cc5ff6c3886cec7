"""Which query sees which key, and how scores are capped and biased: the definitions that all our backends share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Replaces minus infinity, because the difference of two infinities would be NaN.
MASKED = -1e30
# A lower bound for a row's maximum score: exp(MASKED - LOWEST) is 0, and not 1, in a row whose scores are all masked.
LOWEST = 0.5 * MASKED


def visible(
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    """True where a query sees a key: in the same segment (other than 0, padding), not later, and within the window."""
    distance = q_positions[:, :, None] - kv_positions[:, None, :]
    same_segment = (q_segments[:, :, None] == kv_segments[:, None, :]) & (q_segments != 0)[:, :, None]
    causal = same_segment & (distance >= 0)
    return causal if window is None else causal & (distance < window)


def capped(scores: Float[Array, "*any"], softcap: float | None) -> Float[Array, "*any"]:
    """Scores squashed into (-softcap, softcap) by tanh, as in Gemma 2 (arXiv:2408.00118); unchanged without a cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def capped_derivative(scores: Float[Array, "*any"], softcap: float) -> Float[Array, "*any"]:
    """The derivative of `capped`, from its result `scores`."""
    return 1.0 - jax.lax.square(scores / softcap)


def alibi_biased(
    scores: Float[Array, "B K R S"],
    slopes: Float[Array, "K R"] | None,
    q_positions: Int[Array, "B R"],
    kv_positions: Int[Array, "B S"],
) -> Float[Array, "B K R S"]:
    """Scores minus their row's slope times the distance (ALiBi, arXiv:2108.12409); unchanged without slopes.

    Computed from the difference of two integer positions, so that it is exact however far into a row a document is.
    """
    if slopes is None:
        return scores
    negative_distance = (kv_positions[:, None, :] - q_positions[:, :, None]).astype(scores.dtype)
    return scores + slopes.astype(scores.dtype)[None, :, :, None] * negative_distance[:, None]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of scores and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """HIGHEST for float32, whose factors some chips would otherwise round to fewer bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
