"""The types of tensors in GGUF files: their blocks of bytes, and how to decode them.

All types are decoded, and the simple ones encoded, by the package gguf. It does not encode K types: `k_blocks` does.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from jaxtyping import Float, UInt8

from meshtune.quantize.gguf.k_types import K_TYPES, encode_k

ENCODE_NUMBERS = 1 << 22  # encoded at once: the search of K types takes some ten times their memory
UNREAD = ("I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")  # no weights, within products only, or not in the package


@dataclasses.dataclass(frozen=True)
class GgmlType:
    """A type of tensor: its number in files, and the numbers and bytes of a block."""

    name: str
    id: int
    block: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """The bytes of a row. Raises ValueError where blocks do not divide it."""
        if columns % self.block:
            raise ValueError(f"a row of {columns} numbers is not made of {self.name}'s blocks of {self.block}")
        return columns // self.block * self.nbytes


TYPES: dict[str, GgmlType] = {
    kind.name: GgmlType(kind.name, int(kind), *GGML_QUANT_SIZES[kind])
    for kind in GGMLQuantizationType
    if kind.name not in UNREAD
}
BY_ID: dict[int, GgmlType] = {entry.id: entry for entry in TYPES.values()}


def decode(name: str, content: UInt8[np.ndarray, "rows bytes"]) -> Float[np.ndarray, "rows columns"]:
    """The numbers of whole blocks of rows, in float32."""
    if name == "F64":
        return content.view(np.float64).astype(np.float32)
    return quants.dequantize(content, GGMLQuantizationType[name]).astype(np.float32, copy=False)


def encode(name: str, numbers: Float[np.ndarray, "rows columns"]) -> UInt8[np.ndarray, "rows bytes"]:
    """The bytes of rows in a type, a part of them at a time. Raises ValueError where blocks do not divide a row."""
    kind = TYPES[name]
    rows, columns = numbers.shape
    encoded = np.empty((rows, kind.row_bytes(columns)), np.uint8)
    step = max(1, ENCODE_NUMBERS // max(columns, 1))
    for start in range(0, rows, step):
        part = np.ascontiguousarray(numbers[start : start + step], np.float32)
        if name in K_TYPES:
            blocks = encode_k(name, part.reshape(-1, kind.block))
        else:
            blocks = quants.quantize(part, GGMLQuantizationType[name]).view(np.uint8)
        encoded[start : start + step] = blocks.reshape(part.shape[0], -1)
    return encoded
