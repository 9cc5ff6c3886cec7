"""Scales quantised in their turn, to 8 bits, as bitsandbytes does it (https://arxiv.org/abs/2305.14314, section 3).

The scales of a matrix, in row-major order, less their mean, in blocks of 256, each block relative to its largest, as
one of 256 values that lie denser near zero (https://arxiv.org/abs/1511.04561).
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
    """From 0.1 to 1, as torch.linspace makes it: from both ends, each sum rounded once."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64(np.float32((last - first) / np.float32(points - 1)))
    at = np.arange(points)
    up, down = np.float64(first) + step * at, np.float64(last) - step * (points - 1 - at)
    return np.where(at < points // 2, up, down).astype(np.float32)


def nearest_codes(shares: Float[Array, "..."], *, signed: bool = True) -> UInt8[Array, "..."]:
    """The code of the value nearest to each share of [-1, 1]; in the middle between two, the lower.

    The upper half of a float32's bits leaves at most two values to choose between: a table says the lower of the two,
    one comparison which. Two lookups a number where a binary search takes eight.
    """
    first, bounds = _choices(signed)
    halves = jax.lax.bitcast_convert_type(shares, jnp.uint32) >> 16
    lower = jnp.asarray(first)[halves.astype(jnp.int32)]
    return lower + (shares > jnp.asarray(bounds)[lower.astype(jnp.int32)]).astype(jnp.uint8)


@functools.cache
def _choices(signed: bool) -> tuple[UInt8[np.ndarray, "65536"], Float[np.ndarray, "256"]]:
    """(the first code that numbers with these upper 16 bits can have, the bound above which a code is too low)."""
    values = dynamic_map(signed)
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    uppers = np.arange(2**16, dtype=np.uint32) << 16
    ends = np.stack([uppers, uppers | 0xFFFF]).view(np.float32)
    codes = np.searchsorted(bounds, np.where(np.isnan(ends), np.copysign(np.float32(1), ends), ends))
    assert np.all(np.abs(codes[1] - codes[0]) <= 1)
    return codes.min(axis=0).astype(np.uint8), np.append(bounds, np.float32(np.inf))


def nested_blocks(scales: int) -> int:
    """Blocks that so many scales make."""
    return -(-scales // NESTED_BLOCK)


def twice_quantised(
    absmax: Float[np.ndarray, "o n"],
) -> tuple[UInt8[np.ndarray, "o n"], Float[np.ndarray, "m"], np.float32]:
    """(codes, the largest of each block of 256, the mean) of the scales of one matrix.

    On the host, and the mean in float64: whatever the mesh, the numbers are the same.
    """
    offset = np.float32(absmax.mean(dtype=np.float64))
    centred = (absmax - offset).reshape(-1)
    padded = np.zeros(nested_blocks(centred.size) * NESTED_BLOCK, np.float32)
    padded[: centred.size] = centred
    blocks = padded.reshape(-1, NESTED_BLOCK)
    largest = np.abs(blocks).max(axis=1)
    reciprocal = np.where(largest > 0, 1 / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    values = dynamic_map()
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    codes = np.searchsorted(bounds, blocks * reciprocal[:, None]).astype(np.uint8)
    return codes.reshape(-1)[: centred.size].reshape(absmax.shape), largest, offset


def twice_quantised_here(
    absmax: Float[Array, "o n"],
) -> tuple[UInt8[Array, "o n"], Float[Array, "m"], Float[Array, ""]]:
    """`twice_quantised` inside a program, the mean in float32."""
    offset = absmax.mean(dtype=jnp.float32)
    centred = (absmax - offset).reshape(-1)
    blocks = jnp.pad(centred, (0, -centred.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    largest = jnp.abs(blocks).max(axis=1)
    shares = jnp.where(largest > 0, 1 / jnp.where(largest > 0, largest, 1), 0)[:, None] * blocks
    codes = nearest_codes(shares).reshape(-1)[: centred.size]
    return codes.reshape(absmax.shape), largest, offset


def restored(
    codes: UInt8[Array, "*L o n"], largest: Float[Array, "*L m"], offset: Float[Array, "*L"]
) -> Float[Array, "*L o n"]:
    """The scales that `twice_quantised` stored, but for what it rounded."""
    *lead, rows, each = codes.shape
    spread = jnp.broadcast_to(largest[..., None], (*largest.shape, NESTED_BLOCK)).reshape(*lead, -1)
    spread = spread[..., : rows * each].reshape(codes.shape)
    return jnp.asarray(dynamic_map())[codes.astype(jnp.int32)] * spread + offset[..., None, None]
