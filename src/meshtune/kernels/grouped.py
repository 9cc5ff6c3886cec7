"""Products of rows with the matrices of experts: each row is multiplied by the matrix of its own group.

Rows are sorted by group, and no row is dropped. TPUs and GPUs use `jax.lax.ragged_dot_general`. On a CPU XLA expands
that to a product of every row with every matrix; there a loop over tiles of rows does the work of the rows' own groups
alone, in the same order every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Backend = Literal["ragged_dot", "tiles"]
# (part of the weight: all groups [E, ..] or one, dtype) -> its matrices [.., o, i] in that dtype
Read = Callable[[Any, jnp.dtype], Array]

SMALLEST, LARGEST = 8, 128  # rows of a tile
_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_OF_GROUPS_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_OF_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def backend_for(platform: str = "") -> Backend:
    """The backend for a JAX platform ("": the default one)."""
    return "tiles" if (platform or jax.default_backend()) == "cpu" else "ragged_dot"


def cast(weight: Array, dtype: jnp.dtype) -> Array:
    """The `read` of a weight that is an array."""
    return weight.astype(dtype)


def grouped_matmul(
    x: Float[Array, "N i"],
    weight: Any,
    sizes: Int[Array, "E"],
    out: DTypeLike | None = None,
    *,
    read: Read = cast,
    platform: str = "",
) -> Float[Array, "N o"]:
    """The first sizes[0] rows of x times the transposed first matrix of `weight` [E, o, i], the next sizes[1] rows
    times the second, and so on; zeros for rows after the last group.

    Factors are in x's dtype; products are accumulated in float32 or wider and given in `out` (default: x's dtype).
    `weight` is an array, or any tree whose leaves have a leading axis of groups and that `read` makes matrices of; a
    gradient exists for arrays alone.
    """
    assert x.ndim == 2, x.shape
    assert sizes.ndim == 1, sizes.shape
    return _product(read, backend_for(platform), jnp.dtype(x.dtype), jnp.dtype(out or x.dtype), x, weight, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(
    read: Read, backend: Backend, factors: jnp.dtype, out: jnp.dtype, x: Array, weight: Any, sizes: Array
) -> Array:
    if backend == "tiles":
        return _tiles(x, weight, sizes, lambda part: read(part, factors), out, transposed=True)
    return _ragged(x, read(weight, factors), sizes, _OF_GROUPS, out)


def _forward(
    read: Read, backend: Backend, factors: jnp.dtype, out: jnp.dtype, x: Array, weight: Any, sizes: Array
) -> tuple[Array, tuple[Array, Any, Array]]:
    return _product(read, backend, factors, out, x, weight, sizes), (x, weight, sizes)


def _backward(
    read: Read, backend: Backend, factors: jnp.dtype, out: jnp.dtype, saved: tuple[Array, Any, Array], cotangent: Array
) -> tuple[Array, Any, None]:
    x, weight, sizes = saved
    # The barrier keeps the compiler from holding a weight that was read for the forward pass until the backward pass.
    cotangent, weight = lax.optimization_barrier((cotangent.astype(factors), weight))
    if backend == "tiles":
        d_x = _tiles(cotangent, weight, sizes, lambda part: read(part, factors), factors, transposed=False)
    else:
        d_x = _ragged(cotangent, read(weight, factors), sizes, _OF_GROUPS_TRANSPOSED, factors)
    if not isinstance(weight, jax.Array):
        return d_x, None, None
    if backend == "tiles":
        d_weight = _tiles_of_weight(cotangent, x, sizes)
    else:
        d_weight = _ragged(cotangent, x, sizes, _OF_ROWS, jnp.float32)
    return d_x, d_weight.astype(weight.dtype), None


_product.defvjp(_forward, _backward)


def _ragged(left: Array, right: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, out: DTypeLike) -> Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.ragged_dot_general(left, right, sizes, numbers, precision=precision, preferred_element_type=out)


def _tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: about those of a group, as a power of two."""
    size = SMALLEST
    while size < LARGEST and size * groups < rows:
        size *= 2
    return size


def _over_tiles(rows: int, sizes: Array, step: Callable[[Any, Array, Array, Array], Any], begin: Any) -> Any:
    """Calls step(carry, group, first row, which rows are the group's) for every tile of every group, in order.

    A tile has `_tile_rows` rows, of which the last ones may belong to the next group, or lie beyond all rows.
    """
    groups = sizes.shape[0]
    size = _tile_rows(rows, groups)
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // size)
    after = jnp.cumsum(counts)
    group_of = jnp.repeat(jnp.arange(groups), counts, total_repeat_length=rows // size + groups)

    def body(tile: Array, carry: Any) -> Any:
        group = group_of[tile]
        first = ends[group] - sizes[group] + (tile - (after[group] - counts[group])) * size
        return step(carry, group, first, first + jnp.arange(size) < ends[group])

    return lax.fori_loop(0, after[-1], body, begin)


def _padded(x: Array, groups: int) -> Array:
    return jnp.pad(x, ((0, _tile_rows(x.shape[0], groups)), (0, 0)))


def _tile(x: Array, first: Array, inside: Array) -> Array:
    """The rows of a tile, zeros for those of other groups."""
    return jnp.where(inside[:, None], lax.dynamic_slice_in_dim(x, first, inside.shape[0]), 0)


def _tiles(
    x: Array, weight: Any, sizes: Array, read: Callable[[Any], Array], out: DTypeLike, *, transposed: bool
) -> Array:
    """Every row times its group's matrix, or the transposed matrix."""
    rows, groups = x.shape[0], sizes.shape[0]
    one = jax.eval_shape(lambda: read(_group(weight, jnp.int32(0))))
    columns, contracted = (one.shape[0], 1) if transposed else (one.shape[1], 0)
    padded = _padded(x, groups)

    def step(result: Array, group: Array, first: Array, inside: Array) -> Array:
        product = lax.dot_general(
            _tile(padded, first, inside),
            read(_group(weight, group)),
            (((1,), (contracted,)), ((), ())),
            preferred_element_type=out,
        )
        # Rows of the next group, zeros here, are written again by that group's tiles.
        return lax.dynamic_update_slice_in_dim(result, product, first, 0)

    return _over_tiles(rows, sizes, step, jnp.zeros((padded.shape[0], columns), out))[:rows]


def _tiles_of_weight(cotangent: Array, x: Array, sizes: Array) -> Array:
    """cotangent^T x of the rows of each group [E, o, i], in float32 or wider."""
    rows, groups = x.shape[0], sizes.shape[0]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows_of_result, rows_of_x = _padded(cotangent, groups), _padded(x, groups)

    def step(total: Array, group: Array, first: Array, inside: Array) -> Array:
        product = lax.dot_general(
            _tile(rows_of_result, first, inside),
            _tile(rows_of_x, first, inside),
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        return lax.dynamic_update_index_in_dim(total, _group(total, group) + product, group, 0)

    return _over_tiles(rows, sizes, step, jnp.zeros((groups, cotangent.shape[1], x.shape[1]), wide))


def _group(tree: Any, group: Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, group, keepdims=False), tree)
