"""NormHead (https://arxiv.org/abs/2309.10305): an output head whose rows are divided by their length."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def row_scale(weight: Float[Array, "V D"]) -> Float[Array, "V"]:
    """One over the length of each row, float32.

    No length is taken to be less than 1e-12, as in torch.nn.functional.normalize.
    """
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1)
    # Chosen before the root, whose derivative at zero is infinite.
    return jnp.where(squares > 1e-24, lax.rsqrt(jnp.maximum(squares, 1e-24)), 1e12)
