"""Encodes the K types Q4_K, Q5_K and Q6_K: blocks of 256 numbers with a searched scale for every 16 or 32 of them. A
scale is itself a code of six bits (of Q6_K eight) times a float16; Q4_K and Q5_K subtract a minimum, a code times a
second float16. Layouts are those of ggml-common.h.

A scale is itself a code of six bits (of Q6_K eight) times a float16; Q4_K and Q5_K subtract a minimum, a code times a
second float16. `k_search` finds the scales. Layouts are those of ggml (https://github.com/ggml-org/ggml,
ggml-common.h).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

GROUPS = 1 << 13  # searched at once: one size, so one program, whose arrays stay in a cache
TINY = 1e-15  # a group of smaller numbers is zero


def fit_scales_and_minima(
    numbers: Float[np.ndarray, "n groups w"], top: int
) -> tuple[Float[np.ndarray, "n groups"], Float[np.ndarray, "n groups"]]:
    """Searches (scale, minimum) of groups: numbers are close to scale * code - minimum with codes 0 .. top; neither is
    negative. The error is weighted by |x| + the root mean square of the group.

    Each candidate is a divisor close to the one that fits the range. From the codes that it gives, the scale and the
    minimum are computed that fit these codes best in the sense of least squares.
    """
    # Which divisors are tried: first, step and number, as ggml does for four and for five bits.
    tried = (-1.0, 0.1, 21) if top == 15 else (-0.5, 0.1, 16)
    scale, least = _in_parts(functools.partial(_scale_and_minimum, top=top, tried=tried), numbers)
    return scale, least


def fit_scales(numbers: Float[np.ndarray, "n groups w"], half: int) -> Float[np.ndarray, "n groups"]:
    """Searches the scale of groups, with its sign: numbers are close to scale * code with codes -half .. half - 1. The
    error is weighted by x squared."""
    return _in_parts(functools.partial(_scale, half=half), numbers)[0]


def _in_parts(fit, numbers: np.ndarray) -> list[np.ndarray]:
    flat = numbers.reshape(-1, numbers.shape[-1])
    results: list[tuple[np.ndarray, ...]] = []
    for start in range(0, len(flat), GROUPS):
        part = flat[start : start + GROUPS]
        count = len(part)
        if count < GROUPS:
            part = np.concatenate([part, np.zeros((GROUPS - count, part.shape[1]), part.dtype)])
        results.append(tuple(np.asarray(result)[:count] for result in fit(part)))
    return [np.concatenate(parts).reshape(numbers.shape[:-1]) for parts in zip(*results, strict=True)]


@functools.partial(jax.jit, static_argnames=("top", "tried"))
def _scale_and_minimum(
    x: Float[Array, "n w"], *, top: int, tried: tuple[float, float, int]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    x = x.T  # the numbers of a group one after another, so that groups lie side by side in vectors
    weights = jnp.abs(x) + jnp.sqrt(jnp.mean(x * x, axis=0))
    low, high = jnp.minimum(x.min(0), 0), x.max(0)
    flat = high == low
    total, weighted = weights.sum(0), (weights * x).sum(0)

    def codes_of(divisor: Array | float, least: Array) -> Array:
        span = jnp.where(flat, 1, high - least)
        return jnp.clip(jnp.round(divisor / span * (x - least)), 0, top)

    def error(scale: Array, least: Array, codes: Array) -> Array:
        return (weights * (scale * codes + least - x) ** 2).sum(0)

    def candidate(step: Array, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # The range starts at the best minimum so far.
        codes = codes_of(tried[0] + tried[1] * step + top, best[2])
        sum_codes, squares = (weights * codes).sum(0), (weights * codes * codes).sum(0)
        products = (weights * codes * x).sum(0)
        determinant = total * squares - sum_codes * sum_codes
        solvable = determinant > 0
        divisor = jnp.where(solvable, determinant, 1)
        scale = (total * products - weighted * sum_codes) / divisor
        least = (squares * weighted - sum_codes * products) / divisor
        positive = least > 0
        scale = jnp.where(positive, products / jnp.where(squares > 0, squares, 1), scale)
        least = jnp.where(positive, 0, least)
        difference = error(scale, least, codes)
        better = solvable & (difference < best[0])
        return (
            jnp.where(better, difference, best[0]),
            jnp.where(better, scale, best[1]),
            jnp.where(better, least, best[2]),
        )

    first = (error((high - low) / top, low, codes_of(top, low)), (high - low) / top, low)
    _, scale, least = lax.fori_loop(0, tried[2], candidate, first)
    return jnp.where(flat, 0, jnp.maximum(scale, 0)), -jnp.where(flat, low, least)


@functools.partial(jax.jit, static_argnames=("half",))
def _scale(x: Float[Array, "n w"], *, half: int) -> tuple[Float[Array, " n"]]:
    x = x.T
    weights = x * x
    largest = jnp.where(x.max(0) >= -x.min(0), x.max(0), x.min(0))
    zero = jnp.abs(largest) < TINY
    largest = jnp.where(zero, 1, largest)

    def candidate(step: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        codes = jnp.clip(jnp.round(-(half + 0.1 * step) / largest * x), -half, half - 1)
        products, squares = (weights * x * codes).sum(0), (weights * codes * codes).sum(0)
        scale = products / jnp.where(squares > 0, squares, 1)
        better = (squares > 0) & (scale * products > best[0])
        return jnp.where(better, scale * products, best[0]), jnp.where(better, scale, best[1])

    # The divisor that fits the range comes first: of equal candidates the first is kept.
    best = candidate(jnp.zeros(()), (jnp.full_like(largest, -1), jnp.zeros_like(largest)))
    _, scale = lax.fori_loop(0, 19, lambda n, best: candidate(n - 9.0, best), best)
    return (jnp.where(zero, 0, scale),)


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
