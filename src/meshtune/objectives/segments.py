"""Reductions over the segments of packed rows, and broadcasts back to their tokens.

A row of T positions holds segments 1, 2, ...; values per segment are an array [B, S]. The reductions are written as
sums over comparisons rather than as a scatter, so that a mesh that splits rows or positions can compute partial sums
and add them up.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshtune.objectives.score import Batch


def max_segments(batch: Batch, unit_segments: int = 2) -> int:
    """S, the largest number of segments that a row of this batch can have, with `unit_segments` in every unit."""
    return unit_segments * batch["units"].shape[-1] if "units" in batch else batch["segment_ids"].shape[-1]


def segment_sum(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B S"]:
    """The sum of `values` over each of the segments 1 .. count."""
    return jnp.sum(jnp.where(_membership(segment_ids, count), values[..., None], 0.0), axis=1)


def segment_min(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B S"]:
    """The minimum of `values` over each of the segments 1 .. count; infinity for a segment without tokens."""
    return jnp.min(jnp.where(_membership(segment_ids, count), values[..., None], jnp.inf), axis=1)


def to_tokens(values: Float[Array, "B S"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The value of every token's segment; 0 for padding."""
    return jnp.sum(jnp.where(_membership(segment_ids, values.shape[-1]), values[:, None, :], 0.0), axis=-1)


def _membership(segment_ids: Int[Array, "B T"], count: int) -> Bool[Array, "B T S"]:
    return segment_ids[..., None] == jnp.arange(1, count + 1, dtype=segment_ids.dtype)
