"""Token embedding, from a table that may be split over vocabulary and width."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.mesh.layout import Layout


def embedded(table: Float[Array, "V D"], tokens: Int[Array, "B T"], layout: Layout | None) -> Float[Array, "B T D"]:
    """Every token's row of the table, in the table's dtype.

    Where the table's columns are split, each device looks up its columns for its neighbours' tokens too, and the
    results change places; where its rows are, every token is found on one device of tp and summed with zeros. The table
    itself, gigabytes in large models, never moves.
    """
    if layout is None:
        return jnp.take(table, tokens, axis=0)
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
