"""Encodes the K types Q4_K, Q5_K and Q6_K: blocks of 256 numbers with a scale for every 16 or 32 of them.

A scale is itself a code of six bits (of Q6_K eight) times a float16; Q4_K and Q5_K subtract a minimum, a code times a
second float16. `k_search` finds the scales. Layouts are those of ggml (https://github.com/ggml-org/ggml,
ggml-common.h).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from meshtune.quantize.gguf.k_search import fit_scales, fit_scales_and_minima

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def encode_k(name: str, blocks: Float[np.ndarray, "n 256"]) -> UInt8[np.ndarray, "n bytes"]:
    """The bytes of blocks in one of K_TYPES."""
    return _encode_q6(blocks) if name == "Q6_K" else _encode_q45(blocks, 15 if name == "Q4_K" else 31)


def _encode_q45(numbers: np.ndarray, top: int) -> np.ndarray:
    scales, minima = fit_scales_and_minima(numbers.reshape(-1, 8, 32), top)
    step, scale_codes = _code_scales(scales)
    least, minimum_codes = _code_scales(minima)
    width = _half(step) * scale_codes
    shift = _half(least) * minimum_codes
    codes = np.rint(_divide(numbers.reshape(-1, 8, 32) + shift[:, :, None], width[:, :, None]))
    codes = np.clip(codes, 0, top).astype(np.uint8).reshape(-1, 256)
    head = [step, least, _packed_scales(scale_codes, minimum_codes)]
    if top == 31:
        bits = (codes >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
        head.append(np.bitwise_or.reduce(bits, axis=1))
    low = (codes & 15).reshape(-1, 4, 2, 32)
    return np.concatenate([*head, (low[:, :, 0] | (low[:, :, 1] << 4)).reshape(-1, 128)], axis=1)


def _code_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float16 of each block as bytes, codes of six bits) of scales [n, 8] that are not negative."""
    largest = scales.max(1, keepdims=True)
    codes = np.rint(scales * _divide(np.float32(63), largest))
    return _bytes(largest / np.float32(63)), np.minimum(codes, 63).astype(np.uint8)


def _encode_q6(numbers: np.ndarray) -> np.ndarray:
    scales = fit_scales(numbers.reshape(-1, 16, 16), 32)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    inverse = _divide(np.float32(-128), largest)
    step = _bytes(_divide(np.float32(1), inverse))
    scale_codes = np.minimum(np.rint(inverse * scales), 127).astype(np.int8)
    width = (_half(step) * scale_codes)[:, :, None]
    codes = np.clip(np.rint(_divide(numbers.reshape(-1, 16, 16), width)), -32, 31).astype(np.int8) + np.int8(32)
    codes = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes & 15
    halves = np.stack([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], axis=2)
    upper = np.bitwise_or.reduce((codes >> 4) << np.asarray([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    parts = [halves.reshape(-1, 128), upper.reshape(-1, 64), scale_codes.view(np.uint8), step]
    return np.concatenate(parts, axis=1)


def _packed_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Twelve bytes of eight scales and eight minima of six bits: the first four of each whole, with the upper two bits
    of the last four above them; then the lower four bits of these."""
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], axis=1)


def _divide(numbers: np.ndarray | np.float32, by: np.ndarray) -> np.ndarray:
    """A quotient that is 0 where one divides by 0."""
    numbers = np.broadcast_to(numbers, np.broadcast_shapes(np.shape(numbers), by.shape))
    return np.divide(numbers, by, out=np.zeros(numbers.shape, np.float32), where=by != 0)


def _half(content: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(content).view(np.float16).astype(np.float32)


def _bytes(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).view(np.uint8)
