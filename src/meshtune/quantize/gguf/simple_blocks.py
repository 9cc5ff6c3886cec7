"""Blocks of 32 numbers with one scale: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

A number is `scale * code`, of _1 `scale * code + minimum`; scale and minimum are in float16 at the start of a block.
Codes of four bits lie two in a byte, 16 numbers apart; a fifth bit lies in a word of 32 bits before them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

ZERO = {"Q4_0": 8, "Q5_0": 16}  # the code of zero
TOP = {"Q4_1": 15, "Q5_1": 31}  # the code of the largest number


def decode(name: str, blocks: UInt8[np.ndarray, "n bytes"]) -> Float[np.ndarray, "n 32"]:
    """The numbers of blocks."""
    scale = _half(blocks[:, :2])
    if name == "Q8_0":
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    if name in ZERO:
        codes = _codes(blocks[:, 2:], name.startswith("Q5"))
        return scale * (codes.astype(np.int8) - np.int8(ZERO[name])).astype(np.float32)
    codes = _codes(blocks[:, 4:], name.startswith("Q5"))
    return scale * codes.astype(np.float32) + _half(blocks[:, 2:4])


def encode(name: str, blocks: Float[np.ndarray, "n 32"]) -> UInt8[np.ndarray, "n bytes"]:
    """The bytes of blocks, each number rounded to the nearest code of a scale that fits the largest."""
    if name == "Q8_0":
        scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        codes = blocks * _inverse(scale)
        away = np.trunc(codes + np.copysign(np.float32(0.5), codes))
        return np.concatenate([_bytes(scale), away.astype(np.int8).view(np.uint8)], axis=1)
    if name in ZERO:
        zero = ZERO[name]
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
        scale = largest / np.float32(-zero)
        codes = np.trunc(blocks * _inverse(scale) + np.float32(zero + 0.5))
        codes = np.minimum(codes, 2 * zero - 1).astype(np.uint8)
        return np.concatenate([_bytes(scale), _packed(codes, name.startswith("Q5"))], axis=1)
    least = blocks.min(1, keepdims=True)
    scale = (blocks.max(1, keepdims=True) - least) / np.float32(TOP[name])
    codes = np.trunc((blocks - least) * _inverse(scale) + np.float32(0.5))
    codes = np.minimum(codes, TOP[name]).astype(np.uint8)
    return np.concatenate([_bytes(scale), _bytes(least), _packed(codes, name.startswith("Q5"))], axis=1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _half(content: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(content).view(np.float16).astype(np.float32)


def _bytes(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).view(np.uint8)


def _codes(content: np.ndarray, fifth: bool) -> np.ndarray:
    low = content[:, 4:] if fifth else content
    codes = np.concatenate([low & 15, low >> 4], axis=1)
    if not fifth:
        return codes
    bits = np.unpackbits(np.ascontiguousarray(content[:, :4]), axis=1, bitorder="little")
    return codes | (bits << 4)


def _packed(codes: np.ndarray, fifth: bool) -> np.ndarray:
    low = codes & 15
    packed = low[:, :16] | (low[:, 16:] << 4)
    if not fifth:
        return packed
    return np.concatenate([np.packbits(codes >> 4, axis=1, bitorder="little"), packed], axis=1)
