"""Weights quantised again in the formats of published checkpoints."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from meshtune.quantize.published.block_fp8 import BlockFp8
from meshtune.quantize.published.mxfp4 import Mxfp4
from meshtune.quantize.published.scheme import Rewritable
from meshtune.weights.export_codes import InMemory

E4M3, U8, F32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), np.dtype(np.float32)
FP8_SCALES = [F32, np.dtype(ml_dtypes.bfloat16), U8]
FP8 = [
    (BlockFp8(block), {"codes": E4M3, "scales": scales})
    for block in (None, (16, 8), (1, None))
    for scales in FP8_SCALES
]
SCHEMES = [*FP8, (Mxfp4(), {"blocks": U8, "scales": U8})]


def again(scheme: Rewritable, numbers: np.ndarray, dtypes: dict[str, np.dtype]) -> np.ndarray:
    parts = InMemory(scheme.encode(numbers, dtypes))
    assert {role: array.dtype for role, array in parts.arrays.items()} == dtypes
    assert scheme.shape(parts) == numbers.shape
    return scheme.decode(parts, tuple((0, n) for n in numbers.shape))


@pytest.mark.parametrize(("scheme", "dtypes"), SCHEMES)
def test_numbers_move_by_half_a_step_and_not_at_all_a_second_time(scheme: Rewritable, dtypes: dict[str, np.dtype]):
    shape = (3, 64, 40) if isinstance(scheme, Mxfp4) else (40, 64)
    numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    numbers[..., :1, :2] *= 30
    numbers[..., 32:, 8:16] = 0
    once = again(scheme, numbers, dtypes)
    if isinstance(scheme, Mxfp4):
        blocks = numbers.swapaxes(1, 2).reshape(3, 40, 2, 32)
        step = np.exp2(np.floor(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30))) - 2)
        moved = np.abs(once - numbers).swapaxes(1, 2).reshape(blocks.shape)
        assert (moved <= 2 * step).all()  # what is above 6 steps becomes 6, and was below 8
        assert (moved <= np.maximum(step / 4, np.abs(blocks) / 4)).all()
    else:
        largest = np.abs(numbers).max()
        assert (np.abs(once - numbers) <= np.abs(numbers) / 16 + largest / 448 / 256).all()
    error = float(np.sqrt(np.mean((once - numbers) ** 2) / np.mean(numbers**2)))
    assert error < scheme.largest_error
    if isinstance(scheme, Mxfp4) or dtypes["scales"] == U8:  # scales are powers of two
        np.testing.assert_array_equal(again(scheme, once, dtypes), once)
