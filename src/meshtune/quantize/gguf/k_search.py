"""Searches the scales of K types: of several candidates those with the least weighted error of a group of numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

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
