"""The interface of a quantised format: numbers in [-1, 1] to codes and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.quantize.config import StoredFormatName


@dataclasses.dataclass(frozen=True)
class Format:
    """`encode` maps float32 [.., n] in [-1, 1] to codes [.., n / per] of `dtype`; `decode` maps them back to float32.

    `dtype` is the storage dtype of codes, `per` how many numbers one element of it holds. `encode_bfloat16` (if any)
    maps bfloat16 blocks [.., B, n] and their largest magnitudes (float32 [.., B]) to the same codes [.., B, n / per],
    in less time on a CPU.

    Formats without `encode` are those of published checkpoints, whose codes are taken unchanged: `decode` gives
    numbers of any size, to be multiplied by the scales, which `decode_scales` (if any) makes of `scales_dtype`. With
    `has_zeros` each block has a zero point, which is subtracted first.
    """

    name: StoredFormatName
    dtype: str
    per: int
    encode: Callable[[jax.Array], jax.Array] | None
    decode: Callable[[jax.Array], jax.Array]
    encode_bfloat16: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    scales_dtype: str = "float32"
    decode_scales: Callable[[jax.Array], jax.Array] | None = None
    has_zeros: bool = False


def pairs_packed(codes: Array) -> Array:
    """Codes below 16 [.., n] as uint8 [.., n / 2], the first of each pair in the upper half."""
    # As 16-bit integers, whose lower byte is the first code: XLA's CPU backend does not vectorise strided slices.
    pairs = jax.lax.bitcast_convert_type(codes.astype(jnp.uint8).reshape(*codes.shape[:-1], -1, 2), jnp.uint16)
    return ((pairs << 4) | (pairs >> 8)).astype(jnp.uint8)


def pairs_unpacked(packed: Array) -> Array:
    """The inverse of `pairs_packed`."""
    halves = (packed[..., None] >> jnp.array([4, 0], jnp.uint8)) & 15
    return halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def shares(blocks: Float[Array, "*B n"], absmax: Float[Array, "*B"]) -> Float[Array, "*B n"]:
    """Every number divided by the largest magnitude of its block, so in [-1, 1]; zeros where that is zero.

    The reciprocal is computed first, as in bitsandbytes, so that results are equal to the last bit.
    """
    reciprocal = jnp.where(absmax > 0, 1 / jnp.where(absmax > 0, absmax, 1), 0)
    return jnp.clip(blocks * reciprocal[..., None], -1, 1)
