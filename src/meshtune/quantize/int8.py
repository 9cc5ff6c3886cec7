"""INT8: 255 evenly spaced values, symmetric about zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.quantize.format import Format

LARGEST = 127


def _encode(share: jax.Array) -> jax.Array:
    return jnp.round(share * LARGEST).astype(jnp.int8)


def _decode(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * (1 / LARGEST)


INT8 = Format("int8", "int8", 1, _encode, _decode)
