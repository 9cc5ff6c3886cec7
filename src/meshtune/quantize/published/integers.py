"""Integers with scales and zero points, as packed formats of 4 and 8 bits store them, and the words of their files."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int32, Integer, UInt8

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.quantize.config import BLOCK_SIZES, BlockSize
from meshtune.quantize.published.scheme import Box, Form, Parts

WORD = 32  # bits of a packed word
SCALES = ("F16", "BF16", "F32")
ROW_BLOCK = 128  # of weights with one scale for a row: a mesh splits rows in whole blocks
FULL_PRECISION = "use the full-precision checkpoint"

Range = tuple[int, int]  # [start, stop)
Parameters = tuple[Integer[np.ndarray, "o n"], Float[np.ndarray, "o n"]]


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


@dataclasses.dataclass(frozen=True)
class PackedScheme(abc.ABC):
    """A scheme whose weights are integers with scales and zero points, in groups of `group` inputs (-1: all of a row).

    With `act_order` the groups are not runs of neighbours, and no quantised weight holds them. A subclass says which
    tensors they are in.
    """

    bits: int
    group: int
    act_order: bool = False
    skip: tuple[str, ...] = ()

    @abc.abstractmethod
    def row(self, parts: Parts) -> int:
        """Numbers of a row."""

    @abc.abstractmethod
    def integers(self, parts: Parts, box: Box) -> Integers:
        """The integers of a box."""

    @abc.abstractmethod
    def parameters(self, parts: Parts, rows: Range, groups: Range) -> Parameters:
        """(zeros, scales) [rows, groups]."""

    @property
    def per(self) -> int:
        """Codes in a word."""
        return WORD // self.bits

    def size(self, into: int) -> int:
        """Numbers of a group in a row of `into`."""
        return into if self.group == -1 else self.group

    def decode(self, parts: Parts, box: Box) -> Float[np.ndarray, "o i"]:
        return self.integers(parts, box).numbers()

    def form(self, weight: ArraySpec) -> Form | None:
        into = weight.shape[-1]
        return None if self.act_order else form_of(self.bits, self.size(into), into)

    def codes(self, parts: Parts, box: Box) -> UInt8[np.ndarray, "o b"]:
        """A box of the codes of the form: of 4 bits two in a byte, the first in the upper half."""
        rows, (left, right) = box
        if self.bits == 8:
            return self.integers(parts, box).codes
        return pairs(self.integers(parts, (rows, (2 * left, 2 * right))).codes)

    def scales(self, parts: Parts, box: Box) -> Float[np.ndarray, "o n"]:
        return self._of_blocks(parts, box)[1].astype(np.float32)

    def zeros(self, parts: Parts, box: Box) -> Integer[np.ndarray, "o n"]:
        return self._of_blocks(parts, box)[0]

    def _of_blocks(self, parts: Parts, box: Box) -> Parameters:
        """(zeros, scales) of a box [rows, blocks] of the form."""
        rows, (left, right) = box
        into = self.row(parts)
        form = form_of(self.bits, self.size(into), into)
        assert form is not None
        groups = np.arange(left, right) * form.block_size // self.size(into)
        first = int(groups[0])
        zeros, scales = self.parameters(parts, rows, (first, int(groups[-1]) + 1))
        return zeros[:, groups - first], scales[:, groups - first]


def form_of(bits: int, size: int, into: int) -> Form | None:
    """The quantised weight with codes of `bits` bits in groups of `size` along rows of `into` numbers: its blocks are
    the groups, or the largest parts of at most ROW_BLOCK that divide them. None where no block does."""
    block = largest_block(math.gcd(size, into), ROW_BLOCK if size == into else size)
    return None if block is None else Form("uint4" if bits == 4 else "uint8", block)


def largest_block(size: int, limit: int) -> BlockSize | None:
    """The largest block size of at most `limit` that divides a size; None where none does."""
    return next((block for block in reversed(BLOCK_SIZES) if size % block == 0 and block <= limit), None)


def pairs(codes: UInt8[np.ndarray, "o i"]) -> UInt8[np.ndarray, "o b"]:
    """Codes of 4 bits as uint8, the first of each pair in the upper half."""
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def unpack_words(packed: Int32[np.ndarray, "*B n"], bits: int) -> UInt8[np.ndarray, "*B m"]:
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


def check_dtype(dtype: str, expected: Sequence[str], tensors: str) -> None:
    """Raises ValueError where a part of a weight has another dtype."""
    if dtype not in expected:
        raise ValueError(f"{tensors} have dtype {dtype}; supported: {', '.join(expected)}")


def check_shape(shape: tuple[int, ...], expected: tuple[int, ...], tensors: str) -> None:
    """Raises ValueError where a part of a weight has another shape."""
    if tuple(shape) != expected:
        raise ValueError(f"{tensors} have shape {list(shape)}, expected {list(expected)}")


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
