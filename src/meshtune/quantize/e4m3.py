"""E4M3 codes with any scale, as fp8 checkpoints are published: a number is float32(code) * scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.quantize.format import Format


def _decode(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32)


E4M3 = Format("e4m3", "float8_e4m3fn", 1, None, _decode)
