"""MXFP4 as gpt-oss is published: the matrices of a layer's experts in `<name>_blocks` and `<name>_scales`.

A number is E2M1(code) * 2^(scale - 127), as transformers' convert_moe_packed_tensors gives it: exact in bfloat16. The
weight that the family names is the transposed matrix, [E, in, out].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.quantize.mxfp4 import BIAS, PAIRS, VALUES
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape, check_known, is_skipped, skip_list

BLOCK = 32
BYTES = BLOCK // 2
LARGEST_EXPONENT = 2  # of E2M1's largest number, 6
BOUNDS = (VALUES[:7] + VALUES[1:8]) / 2


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Blocks [E, out, in / 32, 16] of two codes a byte, the first in the lower half; scales [E, out, in / 32]."""

    skip: tuple[str, ...] = ()
    method: ClassVar[str] = "mxfp4"
    ending: ClassVar[str] = ""
    endings: ClassVar[Mapping[str, str]] = {"blocks": "_blocks", "scales": "_scales"}
    required: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    ignored: ClassVar[tuple[str, ...]] = ()
    largest_error: ClassVar[float] = 0.2

    def converts(self, module: str, array: ArraySpec) -> bool:
        return array.role == "experts" and not is_skipped(module, self.skip)

    def shape(self, parts: Parts) -> Shape:
        blocks, scales = parts.shape("blocks"), parts.shape("scales")
        if len(blocks) != 4 or blocks[-1] != BYTES:
            raise ValueError(
                f"its blocks have shape {list(blocks)}, expected [experts, rows, blocks of a row, {BYTES}]"
            )
        if scales != blocks[:-1]:
            raise ValueError(f"its scales have shape {list(scales)}, expected {list(blocks[:-1])}")
        if (parts.dtype("blocks"), parts.dtype("scales")) != ("U8", "U8"):
            raise ValueError(f"they have dtypes {parts.dtype('blocks')} and {parts.dtype('scales')}, expected U8")
        experts, out, groups, _ = blocks
        return (experts, groups * BLOCK, out)

    def decode(self, parts: Parts, box: Box) -> np.ndarray:
        experts, (left, right), rows = box
        first, last = left // BLOCK, -(-right // BLOCK)
        blocks = parts.box("blocks", (experts, rows, (first, last), (0, BYTES)))
        scales = parts.box("scales", (experts, rows, (first, last))).astype(np.int32) - BIAS
        numbers = np.ldexp(PAIRS[blocks].reshape(*blocks.shape[:-1], BLOCK), scales[..., None])
        numbers = numbers.reshape(*numbers.shape[:2], -1)[..., left - first * BLOCK : right - first * BLOCK]
        return numbers.swapaxes(1, 2)

    def form(self, weight: ArraySpec) -> Form | None:
        return Form("mxfp4", BLOCK)

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        experts, (left, right), rows = box
        first, last = left // BYTES, -(-right // BYTES)
        blocks = parts.box("blocks", (experts, rows, (first, last), (0, BYTES)))
        blocks = blocks.reshape(*blocks.shape[:2], -1)[..., left - first * BYTES : right - first * BYTES]
        return blocks.swapaxes(1, 2)

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        experts, groups, rows = box
        return parts.box("scales", (experts, rows, groups)).swapaxes(1, 2)

    def encode(self, numbers: np.ndarray, dtypes: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
        experts, into, out = numbers.shape
        blocks = numbers.swapaxes(1, 2).reshape(experts, out, into // BLOCK, BLOCK)
        largest = np.abs(blocks).max(axis=-1)
        exponents = np.clip(np.floor(np.log2(np.where(largest > 0, largest, 1))) - LARGEST_EXPONENT, -BIAS + 1, BIAS)
        shares = np.ldexp(blocks, -exponents.astype(np.int32)[..., None])
        codes = np.searchsorted(BOUNDS, np.abs(shares)).astype(np.uint8) | (np.signbit(shares).astype(np.uint8) << 3)
        packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return {"blocks": packed, "scales": (exponents + BIAS).astype(np.uint8)}


def read(fields: dict[str, Any], where: str) -> Mxfp4:
    """The scheme of a quantization_config. Raises UserError for unsupported fields."""
    check_known(fields, ("modules_to_not_convert", "dequantize"), where)
    return Mxfp4(skip_list(fields, where, "modules_to_not_convert"))
