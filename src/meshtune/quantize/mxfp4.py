"""MXFP4: E2M1 codes in blocks of 32 with a power of two as scale (OCP microscaling formats 1.0), as gpt-oss is
published: two codes a byte, the first in the lower half, and scales as bytes of e8m0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.quantize.format import Format

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
PAIRS = np.stack([np.tile(VALUES, 16), np.repeat(VALUES, 16)], axis=1)  # the two values of every byte
BIAS = 127


def _decode(codes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(codes, tpu=_by_bits, default=_by_lookup)


def _by_lookup(codes: jax.Array) -> jax.Array:
    return jnp.asarray(PAIRS)[codes.astype(jnp.int32)].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _by_bits(codes: jax.Array) -> jax.Array:
    """The bits of float32 numbers, for TPUs, where looking up single numbers is slow."""
    halves = (codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
    code = halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1]).astype(jnp.uint32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + (BIAS - 1)) << 23) | (mantissa << 22)
    half = mantissa * np.uint32(np.float32(0.5).view(np.uint32))
    bits = jnp.where(exponent > 0, normal, half) | ((code >> 3) << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _scales(scales: jax.Array) -> jax.Array:
    """2^(scale - 127); a scale of 0, which means a number below the normal range, gives 0."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)


MXFP4 = Format("mxfp4", "uint8", 2, None, _decode, scales_dtype="uint8", decode_scales=_scales)
