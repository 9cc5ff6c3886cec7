"""Sums over the documents of packed rows, and back to their tokens.

A row of T positions holds segments 1, 2, ...; what is known of each of them is an array [B, S]. Written as sums of
comparisons rather than as a scatter, so that they are in parts, and added up, where a mesh splits rows or positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshtune.objectives.score import Batch


def slots(batch: Batch) -> int:
    """S, the most segments that a row of this batch can have."""
    return 2 * batch["units"].shape[-1] if "units" in batch else batch["segment_ids"].shape[-1]


def totals(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B S"]:
    """The sum of `values` over each of the segments 1 .. count."""
    mine = segment_ids[..., None] == jnp.arange(1, count + 1, dtype=segment_ids.dtype)
    return jnp.sum(jnp.where(mine, values[..., None], 0.0), axis=1)


def least(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B S"]:
    """The smallest of `values` in each of the segments 1 .. count; infinity for one that is not there."""
    mine = segment_ids[..., None] == jnp.arange(1, count + 1, dtype=segment_ids.dtype)
    return jnp.min(jnp.where(mine, values[..., None], jnp.inf), axis=1)


def to_tokens(values: Float[Array, "B S"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Every token's own segment's value; 0 for padding."""
    count = values.shape[-1]
    mine = segment_ids[..., None] == jnp.arange(1, count + 1, dtype=segment_ids.dtype)
    return jnp.sum(jnp.where(mine, values[:, None, :], 0.0), axis=-1)
