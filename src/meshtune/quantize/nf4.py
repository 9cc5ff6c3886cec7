"""NF4: sixteen values at the quantiles of a normal distribution (https://arxiv.org/abs/2305.14314, appendix E).

Codes and scales are those of bitsandbytes, byte for byte.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.quantize.format import Format, pairs_packed, pairs_unpacked

VALUES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
BOUNDS = (VALUES[:-1] + VALUES[1:]) / np.float32(2)
PAIRS = np.stack([np.repeat(VALUES, 16), np.tile(VALUES, 16)], axis=1)  # the two values of every byte


def _encode(share: jax.Array) -> jax.Array:
    code = jnp.zeros(share.shape, jnp.uint8)
    for bound in BOUNDS:
        code = code + (share > bound).astype(jnp.uint8)
    # Packed in a loop of its own: in one loop XLA's CPU backend compares at half the speed.
    return pairs_packed(jax.lax.optimization_barrier(code))


def _decode(codes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(codes, tpu=_by_comparing, default=_by_lookup)


def _by_lookup(codes: jax.Array) -> jax.Array:
    """A table lookup, 20 times as fast as `_by_comparing` on a CPU."""
    return jnp.asarray(PAIRS)[codes.astype(jnp.int32)].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _by_comparing(codes: jax.Array) -> jax.Array:
    """Comparisons alone, for TPUs, where looking up single numbers is slow."""
    code = pairs_unpacked(codes).astype(jnp.int32)
    values = jnp.full(code.shape, VALUES[0], jnp.float32)
    for index, value in enumerate(VALUES[1:], 1):
        values = jnp.where(code >= index, value, values)
    return values


NF4 = Format("nf4", "uint8", 2, _encode, _decode)
