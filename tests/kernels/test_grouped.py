"""Grouped products are those of a loop over groups, in value and gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.kernels import grouped, grouped_triton
from meshtune.kernels.chips import Chip
from meshtune.kernels.grouped import grouped_matmul

SIZES = {
    "uneven": [3, 0, 17, 1, 40, 0],
    "one group has all": [0, 0, 61, 0, 0, 0],
    "rows after the last group": [5, 8, 0, 16, 2, 9],
    "no rows": [0] * 6,
}
ROWS, IN, OUT = 61, 7, 5


def arrays():
    rng = np.random.default_rng(0)
    shapes = ((ROWS, IN), (6, OUT, IN), (ROWS, OUT))
    return [rng.normal(size=shape) for shape in shapes]


def loop_over_groups(x, weight, cotangent, sizes):
    """(result, gradient of x, of the weight), in float64."""
    y, d_x, d_weight = np.zeros_like(cotangent), np.zeros_like(x), np.zeros_like(weight)
    first = 0
    for group, size in enumerate(sizes):
        rows = slice(first, first + size)
        y[rows] = x[rows] @ weight[group].T
        d_x[rows] = cotangent[rows] @ weight[group]
        d_weight[group] = cotangent[rows].T @ x[rows]
        first += size
    return y, d_x, d_weight


CHIPS = {"tiles": Chip("cpu"), "triton": Chip("nvidia", "sm_90"), "ragged_dot": Chip("tpu")}


@pytest.mark.parametrize("backend", CHIPS)
@pytest.mark.parametrize("name", SIZES)
def test_products_are_those_of_a_loop(name, backend):
    """float32 against float64: sums of at most 61 numbers. Kernels run in Pallas's interpreter."""
    assert grouped.backend_for(CHIPS[backend]) == backend
    x, weight, cotangent = arrays()
    sizes = jnp.asarray(SIZES[name], jnp.int32)
    expected = loop_over_groups(x, weight, cotangent, SIZES[name])
    narrow = [jnp.asarray(array, jnp.float32) for array in (x, weight, cotangent)]
    product = functools.partial(grouped_matmul, sizes=sizes, chip=CHIPS[backend], interpret=True)

    @jax.jit
    def all_of(x, weight, cotangent):
        y, pull = jax.vjp(product, x, weight)
        return y, *pull(cotangent)

    for ours, theirs in zip(all_of(*narrow), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chip", [Chip("nvidia", "sm_75"), Chip("amd", "gfx906"), Chip("")])
def test_chips_without_matrix_units_in_triton_loop_over_tiles(chip):
    assert grouped.backend_for(chip) == "tiles"


def test_tiles_of_the_triton_kernels_span_groups_and_columns():
    """Several tiles to a group, a last one that is not full, several steps of terms, in bfloat16: products of numbers
    with 8 bits are exact in float32, and the sums are rounded to 8 bits once."""
    rng = np.random.default_rng(1)
    rows, into, out, sizes = 150, 80, 130, [70, 0, 5, 60]
    x, weight, cotangent = (
        np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float64)
        for shape in ((rows, into), (4, out, into), (rows, out))
    )
    chip = Chip("nvidia", "sm_90")
    narrow = [jnp.asarray(array, jnp.bfloat16) for array in (x, weight, cotangent)]
    y = grouped_triton.product(
        *narrow[:2], jnp.asarray(sizes, jnp.int32), jnp.float32, chip, transposed=True, interpret=True
    )
    d_x = grouped_triton.product(
        narrow[2], narrow[1], jnp.asarray(sizes, jnp.int32), jnp.float32, chip, transposed=False, interpret=True
    )
    d_weight = grouped_triton.weight_grad(narrow[2], narrow[0], jnp.asarray(sizes, jnp.int32), chip, interpret=True)
    for ours, theirs in zip((y, d_x, d_weight), loop_over_groups(x, weight, cotangent, sizes), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend", ["tiles", "triton"])
def test_a_weight_that_is_read_group_by_group(backend, name, monkeypatch):
    """Any tree with a leading axis of groups, such as codes and scales; it has no gradient. Matrices of two of the six
    groups exist at once."""
    monkeypatch.setattr(grouped, "MATRICES_BYTES", 2 * 4 * IN * OUT)
    x, weight, cotangent = arrays()
    sizes = jnp.asarray(SIZES[name], jnp.int32)
    tree = {"codes": jnp.asarray(np.round(weight * 8), jnp.int8), "scale": jnp.full((6, 1, 1), 1 / 8)}

    def read(tree, dtype):
        return (tree["codes"] * tree["scale"]).astype(dtype)

    product = functools.partial(grouped_matmul, read=read, chip=CHIPS[backend], interpret=True)
    y, pull = jax.vjp(lambda x: product(x, tree, sizes), jnp.asarray(x, jnp.float32))
    expected = loop_over_groups(x, np.round(weight * 8) / 8, cotangent, SIZES[name])
    np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull(jnp.asarray(cotangent, jnp.float32))[0], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("count", "nbytes", "several"), [(32, 16 << 20, 8), (8, 200 << 20, 1), (6, 30 << 20, 3)])
def test_matrices_of_as_many_groups_as_fit_are_made_at_once(count, nbytes, several):
    assert grouped._groups_at_once(count, nbytes) == several


@pytest.mark.parametrize(("rows", "groups", "size"), [(16, 64, 8), (4096, 64, 64), (100_000, 8, 128)])
def test_tiles_are_about_as_long_as_groups(rows, groups, size):
    assert grouped._tile_rows(rows, groups) == size
