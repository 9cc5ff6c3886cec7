"""The types of tensors in GGUF files: their blocks of bytes, and the numbers that these stand for.

A new type is one line in TYPES, with the module that has `decode(name, blocks)` and, for what can be written,
`encode(name, blocks)`. Layouts are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h).
"""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
from jaxtyping import Float, UInt8

ENCODE_NUMBERS = 1 << 22  # that are encoded at once: what a search holds beside them is some ten times as much


@dataclasses.dataclass(frozen=True)
class GgmlType:
    """A type of tensor: its number in files, the numbers and bytes of a block, and the module that reads it."""

    name: str
    id: int
    block: int
    nbytes: int
    module: str

    def row_bytes(self, columns: int) -> int:
        """The bytes of a row. Raises ValueError where blocks do not divide it."""
        if columns % self.block:
            raise ValueError(f"a row of {columns} numbers is not made of {self.name}'s blocks of {self.block}")
        return columns // self.block * self.nbytes


TYPES: dict[str, GgmlType] = {
    entry.name: entry
    for entry in (
        GgmlType("F32", 0, 1, 4, "floats"),
        GgmlType("F16", 1, 1, 2, "floats"),
        GgmlType("Q4_0", 2, 32, 18, "simple_blocks"),
        GgmlType("Q4_1", 3, 32, 20, "simple_blocks"),
        GgmlType("Q5_0", 6, 32, 22, "simple_blocks"),
        GgmlType("Q5_1", 7, 32, 24, "simple_blocks"),
        GgmlType("Q8_0", 8, 32, 34, "simple_blocks"),
        GgmlType("Q2_K", 10, 256, 84, "k_blocks"),
        GgmlType("Q3_K", 11, 256, 110, "k_blocks"),
        GgmlType("Q4_K", 12, 256, 144, "k_blocks"),
        GgmlType("Q5_K", 13, 256, 176, "k_blocks"),
        GgmlType("Q6_K", 14, 256, 210, "k_blocks"),
        GgmlType("IQ2_XXS", 16, 256, 66, "codebooks"),
        GgmlType("IQ2_XS", 17, 256, 74, "codebooks"),
        GgmlType("IQ3_XXS", 18, 256, 98, "codebooks"),
        GgmlType("IQ1_S", 19, 256, 50, "codebooks"),
        GgmlType("IQ4_NL", 20, 32, 18, "codebooks"),
        GgmlType("IQ3_S", 21, 256, 110, "codebooks"),
        GgmlType("IQ2_S", 22, 256, 82, "codebooks"),
        GgmlType("IQ4_XS", 23, 256, 136, "codebooks"),
        GgmlType("F64", 28, 1, 8, "floats"),
        GgmlType("IQ1_M", 29, 256, 56, "codebooks"),
        GgmlType("BF16", 30, 1, 2, "floats"),
        GgmlType("TQ1_0", 34, 256, 54, "codebooks"),
        GgmlType("TQ2_0", 35, 256, 66, "codebooks"),
        GgmlType("MXFP4", 39, 32, 17, "codebooks"),
        GgmlType("NVFP4", 40, 64, 36, "codebooks"),
    )
}
BY_ID: dict[int, GgmlType] = {entry.id: entry for entry in TYPES.values()}


def decode(name: str, content: UInt8[np.ndarray, "rows bytes"]) -> Float[np.ndarray, "rows columns"]:
    """The numbers of whole blocks of rows, in float32."""
    kind = TYPES[name]
    rows = content.shape[0]
    blocks = np.ascontiguousarray(content).reshape(-1, kind.nbytes)
    numbers: np.ndarray = _module(kind).decode(name, blocks)
    return numbers.reshape(rows, -1)


def encode(name: str, numbers: Float[np.ndarray, "rows columns"]) -> UInt8[np.ndarray, "rows bytes"]:
    """The bytes of rows in a type, a part of them at a time. Raises ValueError where blocks do not divide a row."""
    kind = TYPES[name]
    rows, columns = numbers.shape
    encoded = np.empty((rows, kind.row_bytes(columns)), np.uint8)
    step = max(1, ENCODE_NUMBERS // max(columns, 1))
    for start in range(0, rows, step):
        part = np.ascontiguousarray(numbers[start : start + step], np.float32)
        blocks: np.ndarray = _module(kind).encode(name, part.reshape(-1, kind.block))
        encoded[start : start + step] = blocks.reshape(part.shape[0], -1)
    return encoded


def _module(kind: GgmlType):
    return importlib.import_module(f"{__name__}.{kind.module}")
