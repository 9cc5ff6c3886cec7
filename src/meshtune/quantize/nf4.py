"""NF4: sixteen values at the quantiles of a normal distribution (https://arxiv.org/abs/2305.14314, appendix E).

Codes and scales are those of bitsandbytes, byte for byte.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int16, UInt8

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
INFINITY = 0x7F80  # the bits of bfloat16's; those of finite magnitudes are less, and in the order of the numbers
PAIRS = np.stack([np.repeat(VALUES, 16), np.tile(VALUES, 16)], axis=1)  # the two values of every byte


def _encode(share: jax.Array) -> jax.Array:
    code = jnp.zeros(share.shape, jnp.uint8)
    for bound in BOUNDS:
        code = code + (share > bound).astype(jnp.uint8)
    # Packed in a loop of its own: in one loop XLA's CPU backend compares at half the speed.
    return pairs_packed(jax.lax.optimization_barrier(code))


def _encode_bfloat16(blocks: BFloat16[Array, "*B n"], absmax: Float[Array, "*B"]) -> UInt8[Array, "*B n/2"]:
    """The codes of `_encode`, by comparing 16-bit integers with bounds that are looked up once a block: no number is
    divided, and a vector register holds twice as many. A binary search takes 4 comparisons of 15."""
    magnitudes = (jax.lax.bitcast_convert_type(absmax, jnp.uint32) >> 16).astype(jnp.int32)
    # Looked up in a loop of its own: otherwise XLA's CPU backend does so for every number of a block.
    bounds = jax.lax.optimization_barrier(jnp.asarray(_bfloat16_bounds())[magnitudes])
    bits = jax.lax.bitcast_convert_type(blocks, jnp.int16)
    order = jnp.where(bits < 0, -(bits & 0x7FFF), bits)

    def bound(index: int) -> Array:
        return bounds[..., index : index + 1]

    def pick(*candidates: Array) -> Array:
        """The bound in the middle of what the comparisons so far leave."""
        for above in reversed(comparisons):
            candidates = tuple(jnp.where(above, b, a) for a, b in zip(candidates[::2], candidates[1::2], strict=True))
        return candidates[0]

    comparisons: list[Array] = []
    for indices in ((7,), (3, 11), (1, 5, 9, 13), (0, 2, 4, 6, 8, 10, 12, 14)):
        comparisons.append(order > pick(*map(bound, indices)))
    code = sum(jnp.where(above, jnp.uint16(8 >> n), jnp.uint16(0)) for n, above in enumerate(comparisons))
    pairs = jax.lax.bitcast_convert_type(jnp.reshape(code, (*order.shape[:-1], -1, 2)), jnp.uint32)
    return ((pairs << 4) | (pairs >> 16)).astype(jnp.uint8)


@functools.cache
def _bfloat16_bounds() -> Int16[np.ndarray, "32768 15"]:
    """The largest bfloat16 numbers whose shares are not above each bound, for blocks whose largest magnitude has these
    15 bits, as integers in the order of the numbers. Found by a binary search over all finite bfloat16 numbers with the
    arithmetic of `format.shares`; XLA takes numbers below the normal range for zero."""
    magnitudes = _flush_subnormals(np.arange(0x8000, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32))
    with np.errstate(all="ignore"):
        reciprocals = np.where(magnitudes > 0, _flush_subnormals(1 / np.where(magnitudes > 0, magnitudes, 1)), 0)
    bounds = np.empty((0x8000, len(BOUNDS)), np.int16)
    for index, value in enumerate(BOUNDS):
        low, high = np.full(0x8000, -INFINITY), np.full(0x8000, INFINITY - 1)
        while np.any(low < high):
            middle = (low + high + 1) // 2
            numbers = (np.abs(middle) | np.where(middle < 0, 0x8000, 0)).astype(np.uint16).view(ml_dtypes.bfloat16)
            with np.errstate(all="ignore"):
                fits = np.clip(_flush_subnormals(numbers.astype(np.float32)) * reciprocals, -1, 1) <= value
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        bounds[:, index] = low
    return bounds


def _flush_subnormals(numbers: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.float32(0), numbers).astype(np.float32)


def _decode(codes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(codes, tpu=_by_comparing, default=_by_lookup)


def _by_lookup(codes: jax.Array) -> jax.Array:
    """A table lookup, 20 times as fast as `_by_comparing` on a CPU."""
    return jnp.asarray(PAIRS)[codes.astype(jnp.int32)].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _by_comparing(codes: jax.Array) -> jax.Array:
    """Uses only comparisons, for TPUs, where looking up single numbers is slow."""
    code = pairs_unpacked(codes).astype(jnp.int32)
    values = jnp.full(code.shape, VALUES[0])
    for index, value in enumerate(VALUES[1:], 1):
        values = jnp.where(code >= index, value, values)
    return values


NF4 = Format("nf4", "uint8", 2, _encode, _decode, _encode_bfloat16)
