"""Positions in attention other than rotary embedding: biases of scores, and queries that grow."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (https://arxiv.org/abs/2108.12409): a score loses its head's slope, one of `slopes`,
    for every position from query back to key."""

    slopes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class LongQuerySpec:
    """Queries that grow with their position: multiplied by 1 + beta * ln(1 + floor((position + offset) / length)).

    Ministral 3 has them, and the layers of Llama 4 without rotary positions.
    """

    beta: float
    length: int
    offset: int = 0

    def __call__(self, q: Float[Array, "B T H h"], positions: Int[Array, "B T"]) -> Float[Array, "B T H h"]:
        """Computed in float32, in q's dtype."""
        steps = jnp.floor((positions.astype(jnp.float32) + self.offset) / self.length)
        return (q.astype(jnp.float32) * (1 + self.beta * jnp.log1p(steps))[:, :, None, None]).astype(q.dtype)
