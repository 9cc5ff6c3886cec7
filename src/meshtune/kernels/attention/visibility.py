"""Who sees whom: the one definition that every backend written here shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Stands for minus infinity where a difference of two of them must not become NaN.
MASKED = -1e30
# The least that the greatest score of a row is taken to be: exp(MASKED - LOWEST) is 0 and not 1 where all is masked.
LOWEST = 0.5 * MASKED


def visible(
    q_positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    """True where a query sees a key: same segment (not 0, padding), not later, and inside the window."""
    apart = q_positions[:, :, None] - kv_positions[:, None, :]
    seen = (q_segments[:, :, None] == kv_segments[:, None, :]) & (q_segments != 0)[:, :, None] & (apart >= 0)
    return seen if window is None else seen & (apart < window)


def capped(scores: Float[Array, "*any"], softcap: float | None) -> Float[Array, "*any"]:
    """Scores squashed into (-softcap, softcap) by tanh, as in Gemma 2 (arXiv:2408.00118); unchanged without a cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def capped_slope(scores: Float[Array, "*any"], softcap: float) -> Float[Array, "*any"]:
    """The derivative of `capped` where its value was `scores`."""
    return 1.0 - jax.lax.square(scores / softcap)


def biased(
    scores: Float[Array, "B K R S"],
    slopes: Float[Array, "K R"] | None,
    q_positions: Int[Array, "B R"],
    kv_positions: Int[Array, "B S"],
) -> Float[Array, "B K R S"]:
    """Scores less their row's slope times the distance (ALiBi, arXiv:2108.12409); unchanged without slopes.

    Of the difference of two positions and not of either: exact, however far into a row a document lies.
    """
    if slopes is None:
        return scores
    apart = (kv_positions[:, None, :] - q_positions[:, :, None]).astype(scores.dtype)
    return scores + slopes.astype(scores.dtype)[None, :, :, None] * apart[:, None]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of scores and sums: float32, or float64 where the inputs are."""
    return jnp.promote_types(dtype, jnp.float32)


def exact(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of products: float32 means float32 on every chip, where some would round the factors."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
