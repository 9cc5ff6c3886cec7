"""The best approximation of a matrix by two narrow ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST
BEYOND = 8  # directions followed beside those wanted, so that the last of these are found as well as the first


def principal(
    weight: Float[Array, "o i"], rank: int, scale: float, iterations: int | None, key: Array
) -> tuple[Float[Array, "r i"], Float[Array, "o r"]]:
    """(A, B), float32, with scale * B A nearest to a weight among all products of this rank; each has half of the
    singular values.

    `iterations` of the subspace's refinement from random directions (https://arxiv.org/abs/0909.4061, algorithm 4.4);
    None: an exact decomposition, which takes minutes for each large matrix.
    """
    weight = weight.astype(jnp.float32)
    width = rank + BEYOND
    if iterations is None or width >= min(weight.shape):
        left, values, right = jnp.linalg.svd(weight, full_matrices=False)
    else:
        basis = _orthonormal(_product(weight, jax.random.normal(key, (weight.shape[1], width))))
        for _ in range(iterations):
            basis = _orthonormal(_product(weight, _orthonormal(_product(weight.T, basis))))
        left, values, right = jnp.linalg.svd(_product(basis.T, weight), full_matrices=False)
        left = _product(basis, left)
    root = jnp.sqrt(values[:rank] / scale)
    return root[:, None] * right[:rank], left[:, :rank] * root


def _product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=HIGHEST)


def _orthonormal(columns: Array) -> Array:
    return jnp.linalg.qr(columns)[0]
