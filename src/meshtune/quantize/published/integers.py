"""Integers with scales and zero points, as packed formats of 4 and 8 bits store them, and the words of their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int32, Integer, UInt8

from meshtune.errors import UserError

WORD = 32  # bits of a packed word
SCALES = ("F16", "BF16", "F32")
FULL_PRECISION = "use the full-precision checkpoint"


@dataclasses.dataclass(frozen=True)
class Integers:
    """A box [out, in] of a weight: `(codes - zeros) * scales`, with one zero and one scale for each group along `in`.

    `scales` are in the dtype of the file; `groups` is the group of each column.
    """

    codes: UInt8[np.ndarray, "o i"]
    zeros: Integer[np.ndarray, "o n"]
    scales: Float[np.ndarray, "o n"]
    groups: Int32[np.ndarray, "i"]

    def numbers(self) -> Float[np.ndarray, "o i"]:
        """The weight in float32, in which the product of an integer of 9 bits and a scale of 16 is exact.

        The tools' own dequantisation is this, rounded to the dtype of the scales.
        """
        zeros, scales = self.zeros.astype(np.float32), self.scales.astype(np.float32)
        numbers = self.codes.astype(np.float32)
        numbers -= zeros[:, self.groups]
        numbers *= scales[:, self.groups]
        return numbers


def unpacked(packed: Int32[np.ndarray, "*B n"], bits: int) -> UInt8[np.ndarray, "*B m"]:
    """The codes of packed words, each word's lowest bits first; `bits` is 4 or 8."""
    content = np.ascontiguousarray(packed).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return content
    assert bits == 4, bits
    return np.stack([content & 15, content >> 4], axis=-1).reshape(*content.shape[:-1], -1)


def packed_range(start: int, stop: int, per: int) -> tuple[int, int]:
    """The words that hold codes start..stop, `per` codes in each."""
    return start // per, -(-stop // per)


def groups_of(start: int, stop: int, size: int) -> tuple[int, int]:
    """The groups that columns start..stop are of, `size` columns in each."""
    return start // size, -(-stop // size)


def check_dtype(dtype: str, expected: Sequence[str], what: str) -> None:
    """Raises ValueError where a part of a weight has another dtype."""
    if dtype not in expected:
        raise ValueError(f"{what} have dtype {dtype}; supported: {', '.join(expected)}")


def check_shape(shape: tuple[int, ...], expected: tuple[int, ...], what: str) -> None:
    """Raises ValueError where a part of a weight has another shape."""
    if tuple(shape) != expected:
        raise ValueError(f"{what} have shape {list(shape)}, expected {list(expected)}")


def check_divides(size: int, into: int) -> None:
    """Raises ValueError for groups that do not divide the rows of a weight."""
    if into % size:
        raise ValueError(f"groups of {size} do not divide its rows of {into} numbers")


def only(field: str, value: object, known: Sequence[object], where: str) -> None:
    """Raises UserError where a field has a value that is not read."""
    if value not in known:
        raise UserError(
            f"{field} is {value!r}, which is not read; supported: {', '.join(map(str, known))}",
            where=f"{where}, {field}",
            fix=FULL_PRECISION,
        )


def integer_field(fields: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    """A positive whole number, or -1. Raises UserError for anything else, and where it is missing without a default."""
    value = fields.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < -1 or value == 0:
        problem = "is missing" if value is None else f"is {value!r}, not a positive whole number"
        raise UserError(f"{field} {problem}", where=f"{where}, {field}", fix=FULL_PRECISION)
    return value
