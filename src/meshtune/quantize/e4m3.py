"""E4M3 codes with any scale, as fp8 checkpoints are published: a number is float32(code) * scale.

Codes are bytes and become floating-point numbers where they are decoded: what `jax.checkpoint` keeps of floating-point
arrays it rounds with `reduce_precision`, which takes the upper exponent for infinity as IEEE formats have it. E4M3 has
finite numbers there, 256 to 448, and would lose them. A byte is also what every backend gathers and slices as it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from meshtune.quantize.format import Format


def codes(numbers: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The bits of the nearest e4m3 numbers."""
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8)


def numbers(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The inverse of `codes`, in float32."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


E4M3 = Format("e4m3", "uint8", 1, None, numbers)
