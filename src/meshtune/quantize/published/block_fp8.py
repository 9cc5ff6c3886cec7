"""Block-scaled fp8, as DeepSeek V3 is published (https://arxiv.org/abs/2412.19437, section 3.3): e4m3 codes with a
scale for each block of rows and columns, or for the whole tensor, in `<weight>_scale_inv`.

A number is float32(code) * scale, rounded once to the dtype of the model, as transformers dequantises it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.quantize.config import BLOCK_SIZES, BlockSize
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape, check_known, is_skipped, skip_list

VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
LARGEST = 448.0
BLOCK = 128  # numbers of a row that share a scale in memory, at most
SCALES = {"F32": np.float32, "BF16": np.float32, "F16": np.float32, "F8_E8M0": np.float32, "U8": np.float32}


@dataclasses.dataclass(frozen=True)
class BlockFp8:
    """Codes [.., out, in] with scales [.., ceil(out / block[0]), ceil(in / block[1])]; without a block one scale. A
    block's second size is None where a row has one scale."""

    block: tuple[int, int | None] | None
    skip: tuple[str, ...] = ()
    method: ClassVar[str] = "fp8"
    ending: ClassVar[str] = ""
    endings: ClassVar[Mapping[str, str]] = {"codes": "", "scales": "_scale_inv"}
    required: ClassVar[tuple[str, ...]] = ("codes", "scales")
    ignored: ClassVar[tuple[str, ...]] = (".activation_scale", ".input_scale")
    largest_error: ClassVar[float] = 0.05

    def converts(self, module: str, array: ArraySpec) -> bool:
        return not is_skipped(module, self.skip)

    def shape(self, parts: Parts) -> Shape:
        shape, scales = parts.shape("codes"), parts.shape("scales")
        if parts.dtype("codes") != "F8_E4M3":
            raise ValueError(f"its codes have dtype {parts.dtype('codes')}, expected F8_E4M3")
        if parts.dtype("scales") not in SCALES:
            raise ValueError(f"its scales have dtype {parts.dtype('scales')}; supported: {', '.join(SCALES)}")
        expected = self._grid(shape)
        if scales != expected and not (self.block is None and scales in ((), (1,), (1, 1))):
            raise ValueError(f"its scales have shape {list(scales)}, expected {list(expected)}")
        return shape

    def _grid(self, shape: Shape) -> Shape:
        if self.block is None:
            return (1,)
        high, wide = self._block(shape)
        return (*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide))

    def _block(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a weight that share a scale."""
        high, wide = self.block or shape[-2:]
        return high, shape[-1] if wide is None else wide

    def decode(self, parts: Parts, box: Box) -> np.ndarray:
        numbers = np.take(VALUES, parts.box("codes", box).view(np.uint8))
        numbers *= self._scales(parts, box, 1)
        return numbers

    def form(self, weight: ArraySpec) -> Form | None:
        size = self._group(weight.shape[-1])
        return None if size is None else Form("e4m3", size)

    def _group(self, into: int) -> BlockSize | None:
        """Neighbours in a row of `into` numbers that share a scale in memory."""
        wide = into if self.block is None or self.block[1] is None else self.block[1]
        fitting: list[BlockSize] = [size for size in BLOCK_SIZES if size <= BLOCK and into % size == wide % size == 0]
        return fitting[-1] if fitting else None

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        return parts.box("codes", box).view(np.uint8)

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        size = self._group(parts.shape("codes")[-1])
        assert size is not None
        return np.broadcast_to(self._scales(parts, box, size), [stop - start for start, stop in box])

    def _scales(self, parts: Parts, box: Box, columns: int) -> np.ndarray:
        """The scale of every `columns` neighbours of a box whose last dimension counts such groups: [*box]."""
        if self.block is None:
            return as_float32(parts.whole("scales")).reshape((1,) * len(box))
        high, wide = self._block(parts.shape("codes"))
        (top, bottom), (left, right) = box[-2:]
        first, last = left * columns // wide, ((right - 1) * columns) // wide + 1
        read = (*box[:-2], (top // high, (bottom - 1) // high + 1), (first, last))
        scales = as_float32(parts.box("scales", read))
        rows = np.arange(top, bottom) // high - top // high
        return scales[..., rows, :][..., np.arange(left, right) * columns // wide - first]

    def encode(self, numbers: np.ndarray, dtypes: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
        *lead, rows, columns = numbers.shape
        high, wide = self._block(numbers.shape)
        grid = (-(-rows // high), -(-columns // wide))
        padded = np.zeros((*lead, grid[0] * high, grid[1] * wide), np.float32)
        padded[..., :rows, :columns] = numbers
        blocks = padded.reshape(*lead, grid[0], high, grid[1], wide)
        largest = np.abs(blocks).max(axis=(-3, -1) if self.block is not None else None)
        scales = _rounded_up(np.where(largest > 0, largest / LARGEST, 1).astype(np.float32), dtypes["scales"])
        shares = (
            blocks / as_float32(scales)[..., :, None, :, None]
            if self.block is not None
            else blocks / as_float32(scales)
        )
        codes = shares.reshape(padded.shape)[..., :rows, :columns].astype(dtypes["codes"])
        return {"codes": codes, "scales": scales if self.block is not None else scales.reshape(1)}


def _rounded_up(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Positive scales in a dtype, none smaller than it was: codes never exceed the largest e4m3 number."""
    if dtype.itemsize == 1:
        exponents = np.ceil(np.log2(scales)).astype(np.int32) + 127
        return np.clip(exponents, 0, 254).astype(np.uint8).view(dtype)
    rounded = scales.astype(dtype)
    if dtype == np.float32:
        return rounded
    bits = rounded.view(np.uint16)
    return np.where(rounded.astype(np.float32) < scales, bits + 1, bits).astype(np.uint16).view(dtype)


def as_float32(scales: np.ndarray) -> np.ndarray:
    """Scales in float32; bytes are exponents of two, as e8m0 has them."""
    return (scales.view(ml_dtypes.float8_e8m0fnu) if scales.dtype == np.uint8 else scales).astype(np.float32)


def read(fields: dict[str, Any], where: str) -> BlockFp8:
    """The scheme of a quantization_config. Raises UserError for unsupported fields."""
    known = (
        "activation_scheme", "fmt", "weight_block_size", "dequantize", "modules_to_not_convert", "ignored_layers",
        "scale_fmt", "expert_dtype",
    )  # fmt: skip
    check_known(fields, known, where)
    for name, values in (("fmt", ("e4m3", "float8_e4m3fn")), ("expert_dtype", ("fp8",))):
        if fields.get(name) not in (None, *values):
            raise UserError(f"{name} = {fields[name]!r} is not implemented: codes must be e4m3", where=where)
    block = fields.get("weight_block_size", (128, 128))
    if block is not None and not (len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise UserError(f"weight_block_size is {block!r}, not two positive numbers", where=where)
    skip = skip_list(fields, where, "modules_to_not_convert", "ignored_layers")
    return BlockFp8(None if block is None else (block[0], block[1]), skip)
