"""The second product of a low-rank adapter, with a gradient that avoids a wide transposition."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshtune.kernels.attention.backend import matmul_precision
from meshtune.model.linear import matmul


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def widen(z: Float[Array, "*B r"], b: Float[Array, "o r"], out: DTypeLike) -> Float[Array, "*B o"]:
    """z B^T in `out`, whose gradient with respect to B never transposes the wide cotangent.

    XLA would compute that gradient as (cotangent^T z), writing out the transposed [out, tokens] cotangent first. Here
    it is (z^T cotangent)^T, summed in float32, and only the [R, out] result is transposed.
    """
    return matmul(z, b, out)


def _widen_forward(z: Array, b: Array, out: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return matmul(z, b, out), (z, b)


def _widen_backward(out: DTypeLike, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    z, b = saved
    cotangent = cotangent.astype(z.dtype)
    tokens = tuple(range(z.ndim - 1))
    precision = matmul_precision(z.dtype)
    narrow = jax.lax.dot_general(
        z, cotangent, ((tokens, tokens), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    # Without the barrier XLA folds the transposition back into the product.
    d_b = jax.lax.optimization_barrier(narrow).T.astype(b.dtype)
    return matmul(cotangent, b.T), d_b


widen.defvjp(_widen_forward, _widen_backward)
