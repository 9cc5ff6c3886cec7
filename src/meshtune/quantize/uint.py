"""Unsigned integers of 4 and 8 bits with zero points, as GPTQ, AWQ and compressed-tensors publish weights: a number is
(code - zero) * scale, exact in float32 for scales of 16 bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.quantize.format import Format, pairs_unpacked


def _decode_pairs(codes: jax.Array) -> jax.Array:
    return pairs_unpacked(codes).astype(jnp.float32)


def _decode(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32)


UINT4 = Format("uint4", "uint8", 2, None, _decode_pairs, has_zeros=True)
UINT8 = Format("uint8", "uint8", 1, None, _decode, has_zeros=True)
