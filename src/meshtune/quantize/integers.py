"""Integers: symmetric ones of 4 and 8 bits, and unsigned ones with zero points.

INT4 and INT8 are evenly spaced values about zero. UINT4 and UINT8 are those of GPTQ, AWQ and compressed-tensors: a
number is (code - zero) * scale, exact in float32 for scales of 16 bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.quantize.format import Format, pairs_packed, pairs_unpacked

LARGEST_INT4, LARGEST_INT8 = 7, 127


def _encode_int4(share: jax.Array) -> jax.Array:
    return pairs_packed(jnp.round(share * LARGEST_INT4) + (LARGEST_INT4 + 1))


def _decode_int4(codes: jax.Array) -> jax.Array:
    return (pairs_unpacked(codes).astype(jnp.float32) - (LARGEST_INT4 + 1)) * (1 / LARGEST_INT4)


def _encode_int8(share: jax.Array) -> jax.Array:
    return jnp.round(share * LARGEST_INT8).astype(jnp.int8)


def _decode_int8(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * (1 / LARGEST_INT8)


def _decode_uint4(codes: jax.Array) -> jax.Array:
    return pairs_unpacked(codes).astype(jnp.float32)


def _decode_uint8(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32)


# Two codes a byte by hand: JAX's own int4 takes a byte each on some backends.
INT4 = Format("int4", "uint8", 2, _encode_int4, _decode_int4)
INT8 = Format("int8", "int8", 1, _encode_int8, _decode_int8)
UINT4 = Format("uint4", "uint8", 2, None, _decode_uint4, has_zeros=True)
UINT8 = Format("uint8", "uint8", 1, None, _decode_uint8, has_zeros=True)
