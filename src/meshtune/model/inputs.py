"""The inputs of a model (tokens, positions, segments), and the lookup of their embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout
from meshtune.model.rope import RopeSpec, angles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visual:
    """The pictures of rows, cut into patches.

    `patches` are K = channels x side x side numbers each. `segments` number the tiles or pictures of a row (0: none).
    `grid` is (row, column, rows, columns) of a patch in its tile or picture. `index` says what a token is: 0 text,
    f + 1 feature f of the row, -1 the end of a row of features (LLaVA-NeXT's image_newline). `features` that
    `encode_pictures` gave before are in place of patches.
    """

    patches: Float[Array, "B P K"]
    segments: Int[Array, "B P"]
    grid: Int[Array, "B P 4"]
    index: Int[Array, "B T"]
    features: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch of rows. Tokens see earlier tokens of their own segment only; segment 0 is padding.

    With `parent_ids` they also see the earlier tokens of the segment that theirs continues (0: none), as completions of
    a prompt that the row holds once: that segment is before theirs in the row, and positions count on from it.

    `positions` are the order of tokens in their document, which decides what they see and how long a document is.
    Rotary embeddings turn by `rope_positions`, where there are any, in place of them: [B, T], or [B, T, 3] of M-RoPE.
    `embeds` are used in place of the embeddings of `tokens`. `side` holds arrays [B, T, ..] that layers read by name.
    Both are differentiated. Features of `visual` take the place of the embeddings of the tokens that stand for them.
    `reach` is the last position that a token sees, where that may be after its own (else 0), in layers whose tokens of
    a picture see each other both ways.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    embeds: Float[Array, "B T D"] | None = None
    side: Tree | None = None
    rope_positions: Int[Array, "B T *n"] | None = None
    parent_ids: Int[Array, "B T"] | None = None
    visual: Visual | None = None
    reach: Int[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """Where the tokens of a batch are in their documents, for all layers. It is not differentiated.

    `angles` holds cos and sin, float32 [B, T, d/2], for every kind of rotary embedding in the model. `windows` are the
    segments of attention within windows of pictures, in towers that have it, `reach` that of
    Inputs.
    """

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    angles: dict[RopeSpec, tuple[Array, Array]]
    parent_ids: Int[Array, "B T"] | None = None
    windows: Int[Array, "B T"] | None = None
    reach: Int[Array, "B T"] | None = None


def inputs_of(batch: Mapping[str, Array]) -> Inputs:
    """Reads the model's inputs out of a batch: tokens, positions and segment_ids, and what else arrays.batch lists of
    positions and pictures, if it is there."""
    tokens, order, segments = (batch[name] for name in ("tokens", "positions", "segment_ids"))
    turns, parents = batch.get("mrope_positions", batch.get("rope_positions")), batch.get("parent_ids")
    visual = None
    if "patches" in batch:
        visual = Visual(*(batch[name] for name in ("patches", "patch_segments", "patch_grid", "visual")))
    reach = batch.get("reach")
    return Inputs(tokens, order, segments, rope_positions=turns, parent_ids=parents, visual=visual, reach=reach)


def sequence_info(inputs: Inputs, ropes: tuple[RopeSpec, ...]) -> SequenceInfo:
    """The positions and segments of a batch, with the rotations of every rope in `ropes`."""
    order, segments = inputs.positions, inputs.segment_ids
    turns = order if inputs.rope_positions is None else inputs.rope_positions
    rotations = {rope: angles(rope, turns, order, segments) for rope in ropes}
    return SequenceInfo(order, segments, rotations, inputs.parent_ids, reach=inputs.reach)


def embed_tokens(table: Float[Array, "V D"], tokens: Int[Array, "B T"], layout: Layout | None) -> Float[Array, "B T D"]:
    """Every token's row of the table, in the table's dtype."""
    return jnp.take(table, tokens, axis=0) if layout is None else _embed_sharded(table, tokens, layout)


def _embed_sharded(table: Array, tokens: Array, layout: Layout) -> Array:
    """Looks tokens up in a table that is split over devices.

    Where the table's columns are split, each device looks up its columns for its neighbours' tokens too, and the
    results change places; where its rows are, every token is found on one device of tp and summed with zeros. The table
    itself, gigabytes in large models, never moves.
    """
    rows, columns = (_axes(layout.spec(("vocab", "embed"), table.shape), place) for place in (0, 1))
    where = layout.spec(("batch", "length"), tokens.shape)
    look_up = partial(_look_up, rows=rows, columns=columns, split={*_axes(where, 0), *_axes(where, 1)})
    in_specs = layout.spec(("vocab", "embed"), table.shape), where
    # Columns gathered from devices that looked up the same tokens are the same on all, which the check cannot see.
    return jax.shard_map(look_up, mesh=layout.mesh, in_specs=in_specs, out_specs=where, check_vma=False)(table, tokens)


def _look_up(table: Array, tokens: Array, *, rows: tuple[str, ...], columns: tuple[str, ...], split: set[str]) -> Array:
    """On one device: mesh axes `rows` and `columns` split the table, those in `split` the tokens."""
    for axis in columns:
        if axis in split:
            tokens = lax.all_gather(tokens, axis)
    if rows:
        first = lax.axis_index(rows) * table.shape[0]
        is_local = (tokens >= first) & (tokens < first + table.shape[0])
        local_rows = jnp.take(table, jnp.where(is_local, tokens - first, 0), axis=0)
        x = lax.psum(jnp.where(is_local[..., None], local_rows, jnp.zeros((), table.dtype)), rows)
    else:
        x = jnp.take(table, tokens, axis=0)
    for axis in reversed(columns):  # the innermost first: its blocks of columns are neighbours
        if axis in split:
            x = lax.all_to_all(x, axis, split_axis=0, concat_axis=x.ndim - 1, tiled=True)[0]
        else:
            x = lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
    return x


def _axes(spec: jax.sharding.PartitionSpec, place: int) -> tuple[str, ...]:
    part = spec[place] if place < len(spec) else None
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


ROWS = "rows"  # their place in the node of the weight they belong to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRows:
    """`values` [n, D] replace the rows `ids` of the weight [V, D] beside them."""

    values: Any
    ids: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def abstract(cls, weight: ArraySpec, ids: tuple[int, ...], dtype: str) -> TokenRows:
        """With an ArraySpec for the array."""
        return cls(ArraySpec((len(ids), weight.shape[1]), dtype, ("whole", weight.axes[1]), role=weight.role), ids)

    def of(self, weight: Float[Array, "V D"]) -> Array:
        """The rows as the weight has them, in this one's dtype."""
        return weight[jax.numpy.asarray(self.ids)].astype(self.values.dtype)

    def merge(self, weight: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """The weight with these rows, in its own dtype."""
        values = self.values.astype(weight.dtype)
        first = self.ids[0]
        if self.ids == tuple(range(first, first + len(self.ids))):
            return jax.lax.dynamic_update_slice(weight, values, (first, 0))
        return weight.at[jax.numpy.asarray(self.ids)].set(values)


def table(node: Tree) -> Array:
    """The weight of an embedding's or a head's node, with the rows that are trained apart."""
    rows = node.get(ROWS)
    return node["weight"] if rows is None else rows.merge(node["weight"])


def fold_rows(params: Tree) -> Tree:
    """Parameters whose tables hold the rows that were trained apart: for many forward passes."""
    nodes = {name: node for name, node in params.items() if isinstance(node, dict) and ROWS in node}
    tables = {name: node | {"weight": jax.jit(table)(node)} for name, node in nodes.items()}
    return params | {name: {key: leaf for key, leaf in node.items() if key != ROWS} for name, node in tables.items()}
