"""Products whose result is wider than their factors, as an output head's logits are, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.model.linear import matmul

ROWS, IN, OUT = (2, 5), 24, 96


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """To bfloat16, in float64."""
    return np.asarray(jnp.asarray(values, jnp.bfloat16)).astype(np.float64)


@pytest.fixture
def numbers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weight and cotangent, in float64."""
    rng = np.random.default_rng(3)
    x, weight = rng.normal(size=(*ROWS, IN)), rng.normal(size=(OUT, IN))
    return round_to_bfloat16(x), round_to_bfloat16(weight), rng.normal(size=(*ROWS, OUT))


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_gradients_of_a_wide_result_are_products_of_rounded_factors(numbers, stored):
    """To half a unit in the last place: of bfloat16 (2^-8) where the result is one, else of sums in float32."""
    x, weight, cotangent = numbers
    y, gradients = jax.vjp(
        lambda x, weight: matmul(x, weight, jnp.float32), jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, stored)
    )
    d_x, d_weight = gradients(jnp.asarray(cotangent, jnp.float32))
    assert (y.dtype, d_x.dtype, d_weight.dtype) == (jnp.float32, jnp.bfloat16, jnp.dtype(stored))
    narrow = round_to_bfloat16(cotangent)
    np.testing.assert_allclose(y, x @ weight.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(d_x).astype(np.float64), narrow @ weight, rtol=2**-8, atol=1e-5)
    expected = np.einsum("abo,abi->oi", narrow, x)
    np.testing.assert_allclose(
        np.asarray(d_weight).astype(np.float64), expected, rtol=2**-8 if stored == "bfloat16" else 1e-5, atol=1e-5
    )


def test_no_product_of_a_gradient_has_a_wide_factor(numbers):
    """Of factors of two dtypes XLA makes the narrow one wider: 5.3 GiB for a head of 262,208 by 5,376 in bfloat16."""
    x, weight, cotangent = (jnp.asarray(array, jnp.bfloat16) for array in numbers)

    def gradients(x, weight):
        return jax.vjp(lambda x, weight: matmul(x, weight, jnp.float32), x, weight)[1](cotangent.astype(jnp.float32))

    program = jax.jit(gradients).lower(x, weight).as_text()
    products = [line.rpartition(" : ")[2] for line in program.splitlines() if "dot_general" in line]
    assert len(products) >= 2
    assert not [types for types in products if "f32" in types.partition("->")[0]]
