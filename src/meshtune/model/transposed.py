"""A weight [out, in] that lies in memory as [in, out], to be multiplied with few rows on a CPU."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

FEW_ROWS = 4  # up to which a product is computed row by row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedWeight:
    """The weight of a linear layer, transposed in memory."""

    numbers: Float[Array, "i o"]

    @classmethod
    def of(cls, weight: Float[Array, "o i"]) -> TransposedWeight:
        """A transposed copy of a weight."""
        return cls(jnp.copy(weight.T))

    def product(self, x: Float[Array, "*B i"], out: DTypeLike, precision: lax.Precision | None) -> Float[Array, "*B o"]:
        """x times the numbers, accumulated and given in `out`.

        On XLA for CPUs a product of two to four rows takes longer than as many products of one row
        (benchmarks/cpu_serving), presumably because it packs the matrix anew each time.
        """

        def times(x: Array) -> Array:
            contracted = (((x.ndim - 1,), (0,)), ((), ()))
            numbers = self.numbers.astype(x.dtype)
            return lax.dot_general(x, numbers, contracted, precision=precision, preferred_element_type=out)

        rows = math.prod(x.shape[:-1])
        if not 1 < rows <= FEW_ROWS:
            return times(x)
        flat = x.reshape(rows, x.shape[-1])
        return jnp.concatenate([times(flat[n : n + 1]) for n in range(rows)]).reshape(*x.shape[:-1], -1)
