"""Double quantisation: 8-bit scales, as in bitsandbytes (https://arxiv.org/abs/2305.14314, section 3).

The scales of a matrix, in row-major order and minus their mean, are divided into blocks of 256; each is stored relative
to the largest magnitude of its block, as one of 256 values that are denser near zero (https://arxiv.org/abs/1511.04561).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

NESTED_BLOCK = 256


@functools.cache
def dynamic_map(signed: bool = True) -> Float[np.ndarray, "256"]:
    """The 256 values, ascending, equal to bitsandbytes' create_dynamic_map(signed) to the last bit."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = _line(2 ** (exponent if signed else exponent + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        decade = np.float32(10.0 ** (exponent - 6)) * middles
        values += [*decade.tolist(), *((-decade).tolist() if signed else ())]
    return np.sort(np.array(values, np.float32))


def _line(points: int) -> Float[np.ndarray, "points"]:
    """`points` values from 0.1 to 1, as torch.linspace computes them: from both ends, each sum rounded once."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64(np.float32((last - first) / np.float32(points - 1)))
    at = np.arange(points)
    up, down = np.float64(first) + step * at, np.float64(last) - step * (points - 1 - at)
    return np.where(at < points // 2, up, down).astype(np.float32)


def nearest_codes(shares: Float[Array, "..."], *, signed: bool = True) -> UInt8[Array, "..."]:
    """The code of the value nearest to each number in [-1, 1]; halfway between two values, the lower.

    The upper half of a float32's bits leaves at most two candidates: a table gives the lower one, and a comparison
    decides. That is two lookups per number, where a binary search takes eight.
    """
    first, bounds = _choices(signed)
    halves = jax.lax.bitcast_convert_type(shares, jnp.uint32) >> 16
    lower = jnp.asarray(first)[halves.astype(jnp.int32)]
    return lower + (shares > jnp.asarray(bounds)[lower.astype(jnp.int32)]).astype(jnp.uint8)


@functools.cache
def _choices(signed: bool) -> tuple[UInt8[np.ndarray, "65536"], Float[np.ndarray, "256"]]:
    """(the lowest code of numbers with these upper 16 bits, the bound above which each code is too low)."""
    values = dynamic_map(signed)
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    uppers = np.arange(2**16, dtype=np.uint32) << 16
    ends = np.stack([uppers, uppers | 0xFFFF]).view(np.float32)
    codes = np.searchsorted(bounds, np.where(np.isnan(ends), np.copysign(np.float32(1), ends), ends))
    assert np.all(np.abs(codes[1] - codes[0]) <= 1)
    return codes.min(axis=0).astype(np.uint8), np.append(bounds, np.float32(np.inf))


def nested_blocks(scales: int) -> int:
    """The number of blocks for this many scales."""
    return -(-scales // NESTED_BLOCK)


def twice_quantised(
    absmax: Float[np.ndarray, "o n"],
) -> tuple[UInt8[np.ndarray, "o n"], Float[np.ndarray, "m"], np.float32]:
    """(codes, the largest magnitude of each block of 256, the mean) of the scales of one matrix.

    Computed on the host, the mean in float64, so that the result does not depend on the mesh.
    """
    offset = np.float32(absmax.mean(dtype=np.float64))
    centred = (absmax - offset).reshape(-1)
    padded = np.zeros(nested_blocks(centred.size) * NESTED_BLOCK, np.float32)
    padded[: centred.size] = centred
    blocks = padded.reshape(-1, NESTED_BLOCK)
    largest = np.abs(blocks).max(axis=1)
    reciprocal = np.where(largest > 0, 1 / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    codes = _nearest_codes_on_host(blocks * reciprocal[:, None])
    return codes.reshape(-1)[: centred.size].reshape(absmax.shape), largest, offset


def _nearest_codes_on_host(shares: Float[np.ndarray, "m n"]) -> UInt8[np.ndarray, "m n"]:
    """`nearest_codes` in numpy: a tenth of the time of a binary search."""
    first, bounds = _choices(True)
    lower = np.take(first, shares.view(np.uint32) >> 16)
    return lower + (shares > np.take(bounds, lower))


def twice_quantised_on_device(
    absmax: Float[Array, "o n"],
) -> tuple[UInt8[Array, "o n"], Float[Array, "m"], Float[Array, ""]]:
    """`twice_quantised` inside jit, with the mean in float32."""
    offset = absmax.mean(dtype=jnp.float32)
    centred = (absmax - offset).reshape(-1)
    blocks = jnp.pad(centred, (0, -centred.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    largest = jnp.abs(blocks).max(axis=1)
    shares = jnp.where(largest > 0, 1 / jnp.where(largest > 0, largest, 1), 0)[:, None] * blocks
    codes = nearest_codes(shares).reshape(-1)[: centred.size]
    return codes.reshape(absmax.shape), largest, offset


def restore_scales(
    codes: UInt8[Array, "*L o n"], largest: Float[Array, "*L m"], offset: Float[Array, "*L"]
) -> Float[Array, "*L o n"]:
    """The scales that `twice_quantised` stored, up to its rounding."""
    *lead, rows, per_row = codes.shape
    spread = jnp.broadcast_to(largest[..., None], (*largest.shape, NESTED_BLOCK)).reshape(*lead, -1)
    spread = spread[..., : rows * per_row].reshape(codes.shape)
    return jnp.asarray(dynamic_map())[codes.astype(jnp.int32)] * spread + offset[..., None, None]
