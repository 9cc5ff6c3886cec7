"""Matrix products of rows sorted by group, one matrix a group: the experts of a mixture.

Rows are sorted by group, and no row is dropped. `jax.lax.ragged_dot` is such a product, but most of XLA's compilers
expand it to a product of every row with every matrix; so it is used where it is not, on TPUs, and there not for the
gradient of the matrices. NVIDIA's and AMD's GPUs have kernels in Triton. Elsewhere a loop over tiles of rows does the
work of the rows' own groups only, in the same order every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from meshtune.kernels.chips import Chip, chip_of, without_triton
from meshtune.lazy import LazyFunction

Backend = Literal["ragged_dot", "triton", "tiles"]
# (part of the weight: all groups [E, ..] or one, dtype) -> its matrices [.., o, i] in that dtype
Read = Callable[[Any, jnp.dtype], Array]

SMALLEST, LARGEST = 8, 128  # rows of a tile
MATRICES_BYTES = 128 << 20  # of matrices that are made of codes at once
triton_product = LazyFunction("meshtune.kernels.grouped_triton:product")
triton_weight_grad = LazyFunction("meshtune.kernels.grouped_triton:weight_grad")
tgmm = LazyFunction("jax.experimental.pallas.ops.tpu.megablox.gmm:tgmm")
TPU_TILE = (128, 128, 512)  # rows, and rows and columns of a tile of the result
_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_OF_GROUPS_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def backend_for(chip: Chip) -> Backend:
    """The backend for a chip."""
    if chip.vendor == "tpu":
        return "ragged_dot"
    return "triton" if without_triton(chip) is None else "tiles"


class _Call(NamedTuple):
    """Static facts of a product: how a weight is read, for which chip, and the dtypes of factors and result."""

    read: Read
    chip: Chip
    factors: jnp.dtype
    out: jnp.dtype
    interpret: bool


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
    chip: Chip | None = None,
    interpret: bool = False,
) -> Float[Array, "N o"]:
    """The first sizes[0] rows of x times the transposed first matrix of `weight` [E, o, i], the next sizes[1] rows
    times the second, and so on; zeros for rows after the last group.

    Factors are in x's dtype; products are accumulated in float32 or wider and given in `out` (default: x's dtype).
    `weight` is an array, or any tree whose leaves have a leading axis of groups and that `read` makes matrices of; a
    gradient exists only for arrays. `chip` is the chip it is computed on (None: the first one here); `interpret` runs
    its kernels in Pallas's interpreter, for tests.
    """
    assert x.ndim == 2, x.shape
    assert sizes.ndim == 1, sizes.shape
    chip = chip_of(jax.default_backend()) if chip is None else chip
    return _product(_Call(read, chip, jnp.dtype(x.dtype), jnp.dtype(out or x.dtype), interpret), x, weight, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, x: Array, weight: Any, sizes: Array) -> Array:
    return _rows_times(call, x, weight, sizes, call.out, transposed=True)


def _forward(call: _Call, x: Array, weight: Any, sizes: Array) -> tuple[Array, tuple[Array, Any, Array]]:
    return _product(call, x, weight, sizes), (x, weight, sizes)


def _backward(call: _Call, saved: tuple[Array, Any, Array], cotangent: Array) -> tuple[Array, Any, None]:
    x, weight, sizes = saved
    # The barrier keeps the compiler from holding a weight that was read for the forward pass until the backward pass.
    cotangent, weight = lax.optimization_barrier((cotangent.astype(call.factors), weight))
    d_x = _rows_times(call, cotangent, weight, sizes, call.factors, transposed=False)
    if not isinstance(weight, jax.Array):
        return d_x, None, None
    return d_x, _of_weight(call, cotangent, x, sizes).astype(weight.dtype), None


_product.defvjp(_forward, _backward)


def _rows_times(call: _Call, x: Array, weight: Any, sizes: Array, out: DTypeLike, *, transposed: bool) -> Array:
    """Every row times its group's matrix, or the transposed matrix, in `out`."""
    backend = backend_for(call.chip)
    if backend == "tiles":
        return _tiles(x, weight, sizes, lambda part: call.read(part, call.factors), out, transposed=transposed)
    if backend == "triton":
        product = functools.partial(triton_product, transposed=transposed, interpret=call.interpret)
        if isinstance(weight, jax.Array):
            return product(x, call.read(weight, call.factors), sizes, out, call.chip)
        return _by_groups(call, product, x, weight, sizes, out, columns=1 if transposed else 2)
    matrices = call.read(weight, call.factors)
    return _ragged_product(x, matrices, sizes, _OF_GROUPS if transposed else _OF_GROUPS_TRANSPOSED, out)


def _by_groups(
    call: _Call, product: Callable[..., Array], x: Array, weight: Any, sizes: Array, out: DTypeLike, *, columns: int
) -> Array:
    """Every row times its group's matrix, where matrices are made of codes: of some groups at a time, so that those of
    all experts, gigabytes in large models, never exist at once. `columns` is the axis of a matrix's columns."""
    matrix = jax.eval_shape(lambda: call.read(jax.tree.map(lambda leaf: leaf[:1], weight), call.factors))
    count = sizes.shape[0]
    several = _groups_at_once(count, matrix.size * matrix.dtype.itemsize)
    if several == count:
        return product(x, call.read(weight, call.factors), sizes, out, call.chip)

    def step(index: Array, result: Array) -> Array:
        first = index * several
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, several), weight)
        return product(x, call.read(part, call.factors), sizes, out, call.chip, first=first, result=result)

    return lax.fori_loop(0, count // several, step, jnp.zeros((x.shape[0], matrix.shape[columns]), out))


def _groups_at_once(count: int, nbytes: int) -> int:
    """The largest divisor of `count` groups whose matrices, of `nbytes` each, take at most `MATRICES_BYTES`; or 1."""
    return max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * nbytes <= MATRICES_BYTES))


def _of_weight(call: _Call, cotangent: Array, x: Array, sizes: Array) -> Array:
    """cotangent^T x of the rows of each group [E, o, i], in float32 or wider."""
    backend = backend_for(call.chip)
    if backend == "tiles":
        return _tiles_of_weight(cotangent, x, sizes)
    if backend == "triton":
        return triton_weight_grad(cotangent, x, sizes, call.chip, interpret=call.interpret)
    return _tpu_weight_grad(cotangent, x, sizes, interpret=call.interpret)


def _tpu_weight_grad(
    cotangent: Float[Array, "N o"], x: Float[Array, "N i"], sizes: Int[Array, "E"], *, interpret: bool
) -> Float[Array, "E o i"]:
    """cotangent^T x of the rows of each group, in float32, by megablox, which comes with JAX."""
    missing = -x.shape[0] % TPU_TILE[0]
    cotangent, x = (jnp.pad(rows, ((0, missing), (0, 0))) for rows in (cotangent, x))
    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        return tgmm(cotangent.T, x, sizes.astype(jnp.int32), jnp.float32, TPU_TILE, interpret=interpret)


def _ragged_product(
    left: Array, right: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, out: DTypeLike
) -> Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.ragged_dot_general(left, right, sizes, numbers, precision=precision, preferred_element_type=out)


def _tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: about those of a group, as a power of two, and no more than there are."""
    size = SMALLEST
    while size < LARGEST and size * groups < rows:
        size *= 2
    return min(size, rows)


class RowTiles(NamedTuple):
    """The tiles in the order of their rows: `count` of them, and beyond these tiles without rows, of any group.

    A tile has the rows from its `first` on, as many as a tile has at most, that lie before its group's `end`.
    """

    group: Int[Array, "S"]
    first: Int[Array, "S"]
    end: Int[Array, "S"]
    count: Int[Array, ""]


def row_tiles(sizes: Int[Array, "E"], rows: int, size: int) -> RowTiles:
    """The tiles of at most `size` rows for groups of `sizes` rows, together at most `rows`."""
    groups = sizes.shape[0]
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // size)
    after = jnp.cumsum(counts)
    longest = rows // size + groups
    group = jnp.repeat(jnp.arange(groups), counts, total_repeat_length=longest)
    tile = jnp.arange(longest)
    first = ends[group] - sizes[group] + (tile - (after[group] - counts[group])) * size
    real = tile < after[-1]
    return RowTiles(group, jnp.where(real, first, rows), jnp.where(real, ends[group], 0), after[-1])


def _over_tiles(rows: int, sizes: Array, step: Callable[[Any, Array, Callable, Array], Any], begin: Any) -> Any:
    """Calls step(carry, group, tile_of, which rows are the group's) for every tile of every group, in order.

    A tile has `_tile_rows` rows; the first and the last ones may belong to other groups; tile_of(x) are those
    of an array, and tile_of(x, new) is the array with new ones.
    """
    size = _tile_rows(rows, sizes.shape[0])
    group, firsts, ends, count = row_tiles(sizes, rows, size)

    def body(number: Array, carry: Any) -> Any:
        first = jnp.minimum(firsts[number], rows - size)  # a tile ends with the last row at the latest
        place = first + jnp.arange(size)
        inside = (place >= firsts[number]) & (place < ends[number])

        def tile_of(x: Array, new: Array | None = None) -> Array:
            if new is None:
                return lax.dynamic_slice_in_dim(x, first, size)
            return lax.dynamic_update_slice_in_dim(x, new, first, 0)

        return step(carry, group[number], tile_of, inside[:, None])

    return lax.fori_loop(0, count, body, begin)


def _tiles(
    x: Array, weight: Any, sizes: Array, read: Callable[[Any], Array], out: DTypeLike, *, transposed: bool
) -> Array:
    """Every row times its group's matrix, or the transposed matrix."""
    matrix = jax.eval_shape(lambda: read(_group(weight, jnp.int32(0))))
    columns, contracted = (matrix.shape[0], 1) if transposed else (matrix.shape[1], 0)

    def step(result: Array, group: Array, tile_of: Callable, inside: Array) -> Array:
        product = lax.dot_general(
            tile_of(x), read(_group(weight, group)), (((1,), (contracted,)), ((), ())), preferred_element_type=out
        )
        return tile_of(result, jnp.where(inside, product, tile_of(result)))

    return _over_tiles(x.shape[0], sizes, step, jnp.zeros((x.shape[0], columns), out))


def _tiles_of_weight(cotangent: Array, x: Array, sizes: Array) -> Array:
    """cotangent^T x of the rows of each group [E, o, i], in float32 or wider."""
    if cotangent.shape[1] > x.shape[1]:  # a product with few rows is several times faster than one with few columns
        return _tiles_of_weight(x, cotangent, sizes).swapaxes(1, 2)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def step(total: Array, group: Array, tile_of: Callable, inside: Array) -> Array:
        product = lax.dot_general(
            jnp.where(inside, tile_of(cotangent), 0),
            tile_of(x),
            (((0,), (0,)), ((), ())),
            preferred_element_type=wide,
        )
        return lax.dynamic_update_index_in_dim(total, _group(total, group) + product, group, 0)

    begin = jnp.zeros((sizes.shape[0], cotangent.shape[1], x.shape[1]), wide)
    return _over_tiles(x.shape[0], sizes, step, begin)


def _group(tree: Any, group: Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, group, keepdims=False), tree)


ORDER = "row_order"  # a name that a rematerialisation policy may keep: an order and its inverse


def order_by(numbers: Int[Array, "N"], count: int) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
    """The stable order of rows by their numbers 0..count-1, and the place of each row in it, its inverse."""
    rows = numbers.shape[0]
    if rows * count <= np.iinfo(np.int32).max:
        # A number and its row as one key: compilers for CPUs sort single keys several times faster.
        order = jnp.sort(numbers.astype(jnp.int32) * rows + jnp.arange(rows, dtype=jnp.int32)) % rows
    else:
        order = jnp.argsort(numbers, stable=True)
    return checkpoint_name((order, lax.platform_dependent(order, cpu=_by_scatter, default=_by_sort)), ORDER)


def _by_sort(order: Array) -> Array:
    return jnp.argsort(order).astype(order.dtype)


def _by_scatter(order: Array) -> Array:
    """The inverse of an order. Faster than a second sort on CPUs; on TPUs a scatter takes its rows one by one."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype), unique_indices=True)
