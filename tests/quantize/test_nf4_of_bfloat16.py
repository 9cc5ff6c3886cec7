"""nf4 codes of bfloat16 numbers, made by comparing integers, are those made from their shares in float32."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from meshtune.quantize.nf4 import BOUNDS
from meshtune.quantize.scales import dynamic_map, twice_quantised
from meshtune.quantize.weight import encode_blocks

INFINITY = 0x7F80


def assert_same_codes(blocks: np.ndarray) -> None:
    """Of bfloat16 blocks [B, n] and the same numbers in float32."""
    numbers = jnp.asarray(blocks)
    codes, absmax = encode_blocks(numbers, format="nf4", block_size=blocks.shape[-1])
    expected, expected_absmax = encode_blocks(numbers.astype(jnp.float32), format="nf4", block_size=blocks.shape[-1])
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(absmax, expected_absmax)


def test_of_every_largest_magnitude_with_the_numbers_beside_every_bound():
    """Of each finite magnitude, the smallest and those below the normal range included."""
    bits = np.arange(INFINITY, dtype=np.uint16)
    magnitudes = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    near = (magnitudes[:, None] * BOUNDS.astype(np.float64)).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int32)
    sides = [np.where(near & 0x7FFF, near + step, near).astype(np.uint16) for step in (-1, 0, 1)]
    ends = [bits[:, None], bits[:, None] | 0x8000, np.zeros_like(bits)[:, None], np.full_like(bits, 0x8000)[:, None]]
    blocks = np.concatenate([*sides, *ends, *[ends[2]] * 15], axis=1)
    blocks = np.where((blocks & 0x7FFF) > bits[:, None], bits[:, None], blocks)  # none above the largest
    assert blocks.shape == (INFINITY, 64)
    assert_same_codes(blocks.view(ml_dtypes.bfloat16))


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_of_random_numbers_of_every_size(block_size):
    bits = np.random.default_rng(block_size).integers(0, 2**16, (4096, block_size), np.uint16)
    finite = np.where((bits & 0x7FFF) < INFINITY, bits, bits & 0x80FF)
    assert_same_codes(finite.view(ml_dtypes.bfloat16))


def test_codes_of_scales_are_those_of_a_binary_search():
    values = dynamic_map()
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    absmax = np.abs(np.random.default_rng(0).normal(size=(64, 256))).astype(np.float32)
    absmax[:, :255] = np.float32(0.5) + np.float32(0.25) * bounds  # shares on and beside each bound
    codes, largest, offset = twice_quantised(absmax)
    centred = absmax - offset
    shares = centred * (1 / largest)[:, None]
    np.testing.assert_array_equal(codes, np.searchsorted(bounds, shares))
