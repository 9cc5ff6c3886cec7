"""Blocks of 256 numbers with a scale for every 16 or 32, itself a code of six bits (or four, or eight) times a float16.

Q2_K, Q4_K and Q5_K subtract a minimum, a code times a second float16; Q3_K and Q6_K do not. Q4_K, Q5_K and Q6_K are
written too; `k_search` finds their scales.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from meshtune.quantize.gguf.k_search import fit_scales, fit_scales_and_minima


def decode(name: str, blocks: UInt8[np.ndarray, "n bytes"]) -> Float[np.ndarray, "n 256"]:
    """The numbers of blocks."""
    return {"Q2_K": _q2, "Q3_K": _q3, "Q4_K": _q4, "Q5_K": _q5, "Q6_K": _q6}[name](blocks)


def encode(name: str, blocks: Float[np.ndarray, "n 256"]) -> UInt8[np.ndarray, "n bytes"]:
    """The bytes of blocks. Raises ValueError for a type that is only read."""
    if name == "Q6_K":
        return _encode_q6(blocks)
    if name in ("Q4_K", "Q5_K"):
        return _encode_q45(blocks, 15 if name == "Q4_K" else 31)
    raise ValueError(f"{name} is not written")


def _q2(blocks: np.ndarray) -> np.ndarray:
    scales, codes = blocks[:, :16], _two_bits(blocks[:, 16:80])
    step = _half(blocks[:, 80:82]) * (scales & 15)
    least = _half(blocks[:, 82:84]) * (scales >> 4)
    return _flat(step[:, :, None] * codes.reshape(-1, 16, 16) - least[:, :, None])


def _q3(blocks: np.ndarray) -> np.ndarray:
    high, codes, packed = blocks[:, :32], _two_bits(blocks[:, 32:96]), blocks[:, 96:108]
    scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    upper = (packed[:, None, 8:] >> np.asarray([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = (scales | (upper.reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)
    bits = (high[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    signed = codes.astype(np.int8) - np.where(bits.reshape(-1, 256) == 1, np.int8(0), np.int8(4))
    step = _half(blocks[:, 108:110]) * scales
    return _flat(step[:, :, None] * signed.reshape(-1, 16, 16))


def _q4(blocks: np.ndarray) -> np.ndarray:
    return _with_minima(blocks, _four_bits(blocks[:, 16:]))


def _q5(blocks: np.ndarray) -> np.ndarray:
    bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_minima(blocks, _four_bits(blocks[:, 48:]) | (bits.reshape(-1, 256) << 4))


def _q6(blocks: np.ndarray) -> np.ndarray:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.asarray([0, 4], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.asarray([0, 2, 4, 6], np.uint8)[:, None]
    codes = (low.reshape(-1, 256) & 15) | ((high.reshape(-1, 256) & 3) << 4)
    step = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    return _flat(step[:, :, None] * (codes.astype(np.int8) - np.int8(32)).reshape(-1, 16, 16))


def _with_minima(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    scales, minima = _unpacked_scales(blocks[:, 4:16])
    step, least = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima
    return _flat(step[:, :, None] * codes.reshape(-1, 8, 32) - least[:, :, None])


def _encode_q45(numbers: np.ndarray, top: int) -> np.ndarray:
    scales, minima = fit_scales_and_minima(numbers.reshape(-1, 8, 32), top)
    step, scale_codes = _coded(scales)
    least, minimum_codes = _coded(minima)
    width = _half(step) * scale_codes
    shift = _half(least) * minimum_codes
    codes = np.rint(_divided(numbers.reshape(-1, 8, 32) + shift[:, :, None], width[:, :, None]))
    codes = np.clip(codes, 0, top).astype(np.uint8).reshape(-1, 256)
    head = [step, least, _packed_scales(scale_codes, minimum_codes)]
    if top == 31:
        bits = (codes >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
        head.append(np.bitwise_or.reduce(bits, axis=1))
    low = (codes & 15).reshape(-1, 4, 2, 32)
    return np.concatenate([*head, (low[:, :, 0] | (low[:, :, 1] << 4)).reshape(-1, 128)], axis=1)


def _coded(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float16 of each block as bytes, codes of six bits) of scales [n, 8] that are not negative."""
    largest = scales.max(1, keepdims=True)
    codes = np.rint(scales * _divided(np.float32(63), largest))
    return _bytes(largest / np.float32(63)), np.minimum(codes, 63).astype(np.uint8)


def _encode_q6(numbers: np.ndarray) -> np.ndarray:
    scales = fit_scales(numbers.reshape(-1, 16, 16), 32)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(1)[:, None], 1)
    inverse = _divided(np.float32(-128), largest)
    step = _bytes(_divided(np.float32(1), inverse))
    scale_codes = np.minimum(np.rint(inverse * scales), 127).astype(np.int8)
    width = (_half(step) * scale_codes)[:, :, None]
    codes = np.clip(np.rint(_divided(numbers.reshape(-1, 16, 16), width)), -32, 31).astype(np.int8) + np.int8(32)
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


def _unpacked_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 6) << 4)], axis=1)
    return scales, np.concatenate([second & 63, (low >> 4) | ((second >> 6) << 4)], axis=1)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    return ((packed.reshape(-1, 2, 1, 32) >> np.asarray([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(-1, 256)


def _four_bits(packed: np.ndarray) -> np.ndarray:
    return ((packed.reshape(-1, 4, 1, 32) >> np.asarray([0, 4], np.uint8)[:, None]) & 15).reshape(-1, 256)


def _divided(numbers: np.ndarray | np.float32, by: np.ndarray) -> np.ndarray:
    """A quotient that is 0 where one divides by 0."""
    numbers = np.broadcast_to(numbers, np.broadcast_shapes(np.shape(numbers), by.shape))
    return np.divide(numbers, by, out=np.zeros(numbers.shape, np.float32), where=by != 0)


def _half(content: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(content).view(np.float16).astype(np.float32)


def _bytes(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).view(np.uint8)


def _flat(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32).reshape(-1, 256)
