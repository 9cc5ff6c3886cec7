"""What a quantised format is: numbers in [-1, 1] to codes and back. A format is one value of this class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Format:
    """`encode` takes float32 [.., n] in [-1, 1] to codes [.., n / per] of `dtype`; `decode` gives float32 [.., n] back.

    `dtype` is what codes are kept in, `per` the numbers in one element of it.
    """

    name: str
    dtype: str
    per: int
    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]


def pairs_packed(codes: Array) -> Array:
    """Codes below 16 [.., n] as uint8 [.., n / 2], the first of each pair in the upper half."""
    codes = codes.astype(jnp.uint8)
    return (codes[..., ::2] << 4) | codes[..., 1::2]


def pairs_unpacked(packed: Array) -> Array:
    """The inverse of `pairs_packed`."""
    halves = (packed[..., None] >> jnp.array([4, 0], jnp.uint8)) & 15
    return halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def shares(blocks: Float[Array, "*B n"], absmax: Float[Array, "*B"]) -> Float[Array, "*B n"]:
    """Every number as a share, in [-1, 1], of the largest of its block; zeros where that is zero.

    The reciprocal is taken first, as bitsandbytes does, so that the last bits are the same too.
    """
    reciprocal = jnp.where(absmax > 0, 1 / jnp.where(absmax > 0, absmax, 1), 0)
    return jnp.clip(blocks * reciprocal[..., None], -1, 1)
