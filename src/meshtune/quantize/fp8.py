"""FP8: e4m3 floating point, finite numbers only (https://arxiv.org/abs/2209.05433)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.quantize.format import Format

LARGEST = 448.0


def _encode(share: jax.Array) -> jax.Array:
    return (share * LARGEST).astype(jnp.float8_e4m3fn)


def _decode(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * (1 / LARGEST)


FP8 = Format("fp8", "float8_e4m3fn", 1, _encode, _decode)
