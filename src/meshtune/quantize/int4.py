"""INT4: fifteen evenly spaced values, symmetric about zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshtune.quantize.format import Format, pairs_packed, pairs_unpacked

LARGEST = 7


def _encode(share: jax.Array) -> jax.Array:
    return pairs_packed(jnp.round(share * LARGEST) + (LARGEST + 1))


def _decode(codes: jax.Array) -> jax.Array:
    return (pairs_unpacked(codes).astype(jnp.float32) - (LARGEST + 1)) * (1 / LARGEST)


# Two codes a byte by hand: JAX's own int4 takes a byte each on some backends.
INT4 = Format("int4", "uint8", 2, _encode, _decode)
