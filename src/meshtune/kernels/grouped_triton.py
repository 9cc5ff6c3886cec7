"""Grouped matrix products by Triton kernels on GPUs.

A program computes one tile of a result, whose rows all belong to one group, so the work is that of the rows' own
groups, up to the last tile of each. Every number is computed by one program in a fixed order: equal inputs give equal
bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from meshtune.kernels.chips import Chip
from meshtune.kernels.grouped import row_tiles

SMALLEST = 16  # rows, columns or terms of a product of matrix units


class Tile(NamedTuple):
    """Rows and columns of a tile of a result, the terms that are added at a time, warps and pipeline stages."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def tile_for(chip: Chip, dtype: DTypeLike, rows: int, columns: int, terms: int) -> Tile:
    """The tile for a result of about `rows` x `columns` per group, each a sum of `terms` products."""
    if jnp.dtype(dtype).itemsize > 2:  # exact float32 products use no matrix units
        return Tile(_fitting(32, rows), _fitting(32, columns), _fitting(32, terms), 4, 1)
    width = 128 if rows >= 1024 else 64
    deep, stages = (64, 3) if chip.vendor == "nvidia" else (32, 1)
    tile = Tile(_fitting(width, rows), _fitting(128, columns), _fitting(deep, terms), 4, stages)
    return tile._replace(warps=8) if tile.rows * tile.columns > 64 * 128 else tile


def _fitting(largest: int, n: int) -> int:
    """A power of two from `SMALLEST` to `largest`, `n` or more if it may be."""
    return max(SMALLEST, min(largest, 1 << max(n - 1, 0).bit_length()))


def product(
    x: Float[Array, "N c"],
    weight: Float[Array, "E o i"],
    sizes: Int[Array, "E"],
    out: DTypeLike,
    chip: Chip,
    *,
    transposed: bool,
    interpret: bool = False,
    first: Int[Array, ""] | int = 0,
    result: Array | None = None,
) -> Array:
    """Every row times its group's matrix [N, i], or the transposed matrix [N, o]; zeros for rows after the last
    group.

    `weight` may be that of some groups, from group `first` on: their rows are then written into `result`, whose other
    rows stay unchanged.
    """
    rows, terms = x.shape
    groups, columns = weight.shape[0], weight.shape[1 if transposed else 2]
    tile = tile_for(chip, x.dtype, rows // sizes.shape[0], columns, terms)
    with_rest = jnp.append(sizes, rows - jnp.sum(sizes)).astype(jnp.int32)
    group, start, end, _ = row_tiles(with_rest, rows, tile.rows)
    group = group - first
    padded_rows, padded_columns = _round_up(rows + tile.rows, tile.rows), _round_up(columns, tile.columns)
    padded_terms = _round_up(terms, tile.terms)
    weight_block = (padded_columns, padded_terms) if transposed else (padded_terms, padded_columns)
    tiles = _unblocked_spec((padded_rows, padded_columns))
    before = () if result is None else (result,)
    return pl.pallas_call(
        functools.partial(_product_kernel, tile, (groups, columns, terms), transposed),
        grid=(padded_columns // tile.columns, group.shape[0]),
        in_specs=[
            _unblocked_spec((padded_rows, padded_terms)),
            _unblocked_spec((groups, *weight_block)),
            *[_unblocked_spec(group.shape)] * 3,
            *[tiles] * len(before),
        ],
        out_specs=tiles,
        input_output_aliases={5: 0} if before else {},
        out_shape=jax.ShapeDtypeStruct((rows, columns), out),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_product",
    )(x, weight, group, start, end, *before)


def _product_kernel(
    tile: Tile, shape: tuple[int, int, int], transposed: bool, x, weight, groups, firsts, ends, *results
) -> None:
    *before, result = results
    count, columns, terms = shape
    column, index = pl.program_id(0) * tile.columns, pl.program_id(1)
    group, first, end = groups[index], firsts[index], ends[index]
    rows = _below(first, tile.rows, end)[:, None]
    own_columns = _below(column, tile.columns, columns)

    def add(step, total):
        term = step * tile.terms
        own_terms = _below(term, tile.terms, terms)
        of_columns, of_terms = pl.ds(column, tile.columns), pl.ds(term, tile.terms)
        left = _load(x.at[pl.ds(first, tile.rows), of_terms], rows & own_terms[None, :])
        if transposed:
            right = _load(weight.at[group, of_columns, of_terms], own_columns[:, None] & own_terms[None, :])
        else:
            right = _load(weight.at[group, of_terms, of_columns], own_terms[:, None] & own_columns[None, :])
        return total + _dot(left, right, 1, 1 if transposed else 0)

    # Rows after the last group are a group without a matrix: zeros, where there was no result before.
    real = (group >= 0) & (group < count) & (first < end)
    steps = real.astype(jnp.int32) * -(-terms // tile.terms)
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    into = result.at[pl.ds(first, tile.rows), pl.ds(column, tile.columns)]
    written = rows & own_columns[None, :]
    plt.store(into, total.astype(result.dtype), mask=written & real if before else written)


def weight_grad(
    cotangent: Float[Array, "N o"],
    x: Float[Array, "N i"],
    sizes: Int[Array, "E"],
    chip: Chip,
    *,
    interpret: bool = False,
) -> Float[Array, "E o i"]:
    """cotangent^T x of the rows of each group, in float32."""
    (rows, out), into = cotangent.shape, x.shape[1]
    groups = sizes.shape[0]
    tile = tile_for(chip, x.dtype, out, into, rows // groups)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    padded_rows = _round_up(rows + tile.terms, tile.terms)
    grid = (-(-into // tile.columns), -(-out // tile.rows), groups)
    return pl.pallas_call(
        functools.partial(_weight_grad_kernel, tile, (out, into)),
        grid=grid,
        in_specs=[
            _unblocked_spec((padded_rows, grid[1] * tile.rows)),
            _unblocked_spec((padded_rows, grid[0] * tile.columns)),
            *[_unblocked_spec((groups,))] * 2,
        ],
        out_specs=pl.BlockSpec((None, tile.rows, tile.columns), lambda i, o, group: (group, o, i)),
        out_shape=jax.ShapeDtypeStruct((groups, out, into), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="grouped_weight_grad",
    )(cotangent, x, ends - sizes.astype(jnp.int32), ends)


def _weight_grad_kernel(tile: Tile, shape: tuple[int, int], cotangent, x, firsts, ends, result) -> None:
    out, into = shape
    column, row, group = pl.program_id(0) * tile.columns, pl.program_id(1) * tile.rows, pl.program_id(2)
    first, end = firsts[group], ends[group]
    own_columns, own_rows = _below(column, tile.columns, into)[None, :], _below(row, tile.rows, out)[None, :]

    def add(step, total):
        term = first + step * tile.terms
        own_terms = _below(term, tile.terms, end)[:, None]
        left = _load(cotangent.at[pl.ds(term, tile.terms), pl.ds(row, tile.rows)], own_terms & own_rows)
        right = _load(x.at[pl.ds(term, tile.terms), pl.ds(column, tile.columns)], own_terms & own_columns)
        return total + _dot(left, right, 0, 0)

    steps = (end - first + tile.terms - 1) // tile.terms
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    mask = jnp.broadcast_to(own_rows.reshape(-1, 1) & own_columns, total.shape)
    plt.store(result, total, mask=mask)


def _round_up(n: int, size: int) -> int:
    return -(-n // size) * size


def _unblocked_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All of an array, and the part of tiles beyond its end."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _below(first, size: int, end):
    return first + jnp.arange(size) < end


def _load(ref, mask):
    return plt.load(ref, mask=mask, other=0.0)


def _dot(x, y, x_axis: int, y_axis: int):
    """Contracts one axis of each, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
