"""What goes into a model: tokens or embeddings, where they stand in their documents, and side inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import Array, Float, Int

from meshtune.arrays.tree import Tree
from meshtune.model.rope import RopeSpec, angles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch of rows. Tokens see earlier tokens of their own segment only; segment 0 is padding.

    `positions` are the order of tokens in their document, which decides what is visible and how long a document is.
    Rotary embeddings turn by `rope_positions`, where there are any, in place of them. `embeds` are used in place of the
    embeddings of `tokens`. `side` holds arrays [B, T, ..] that layers read by name. Both are differentiated.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    embeds: Float[Array, "B T D"] | None = None
    side: Tree | None = None
    rope_positions: Int[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What all layers know of the tokens. It is not differentiated.

    `angles` holds cos and sin, float32 [B, T, d/2], for every kind of rotary embedding in the model.
    """

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    angles: dict[RopeSpec, tuple[Array, Array]]


def inputs_of(batch: Mapping[str, Array]) -> Inputs:
    """Reads the model's inputs out of a batch: tokens, positions and segment_ids, and rope_positions if there are any,
    all int32 [B, T]."""
    order = batch["positions"]
    return Inputs(batch["tokens"], order, batch["segment_ids"], rope_positions=batch.get("rope_positions"))


def rows_of(inputs: Inputs, ropes: tuple[RopeSpec, ...]) -> Rows:
    """The rows of a batch, with the rotations of every rope in `ropes`."""
    order, segments = inputs.positions, inputs.segment_ids
    turns = order if inputs.rope_positions is None else inputs.rope_positions
    return Rows(order, segments, {rope: angles(rope, turns, order, segments) for rope in ropes})
