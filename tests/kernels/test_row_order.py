"""Orders of rows against numpy's stable sort."""

import jax
import numpy as np
import pytest

from meshtune.kernels.grouped import order_by


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1000, 7), (4096, 65), (3000, 2**20)])
def test_the_order_is_stable_and_the_places_are_its_inverse(rows, count):
    numbers = np.random.default_rng(rows).integers(0, min(count, 100), rows).astype(np.int32)
    numbers[-1] = count - 1
    order, place = jax.jit(order_by, static_argnums=1)(numbers, count)
    expected = np.argsort(numbers, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(place, np.argsort(expected))
