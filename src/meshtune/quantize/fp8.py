"""FP8: e4m3 floating point, finite numbers only (https://arxiv.org/abs/2209.05433).

FP8 is relative to the largest number. E4M3 has any scale, as fp8 checkpoints are published: a number is
float32(code) * scale.

Codes are bytes and become floating-point numbers where they are decoded: what `jax.checkpoint` keeps of floating-point
arrays it rounds with `reduce_precision`, which takes the upper exponent for infinity as IEEE formats have it. E4M3 has
finite numbers there, 256 to 448, and would lose them. A byte is also what every backend gathers and slices as it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from meshtune.quantize.format import Format

LARGEST = 448.0


def e4m3_codes(numbers: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The bits of the nearest e4m3 numbers."""
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8)


def e4m3_numbers(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The inverse of `e4m3_codes`, in float32."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _encode(share: jax.Array) -> jax.Array:
    return e4m3_codes(share * LARGEST)


def _decode(codes: jax.Array) -> jax.Array:
    return e4m3_numbers(codes) * (1 / LARGEST)


FP8 = Format("fp8", "uint8", 1, _encode, _decode)
E4M3 = Format("e4m3", "uint8", 1, None, e4m3_numbers)
