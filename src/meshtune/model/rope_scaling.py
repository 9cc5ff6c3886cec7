"""Context extensions of rotary position embeddings, as functions of the base frequencies.

Formulas follow the papers and transformers' `modeling_rope_utils`, which the tests compare with: linear (position
interpolation, https://arxiv.org/abs/2306.15595), dynamic NTK, YaRN (https://arxiv.org/abs/2309.00071), llama3, LongRoPE
(https://arxiv.org/abs/2402.13753), and NTK with a fixed factor (Hunyuan's alpha). `numbers` are the fields of
`rope_parameters` in config.json, `original_length` the context that the base frequencies were trained for.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LONGROPE_FACTORS = ("short_factor", "long_factor")  # of documents within the original context, and of longer ones


def extended(
    kind: str,
    inverse: np.ndarray,
    numbers: dict[str, Any],
    theta: float,
    lengths: tuple[int, int],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> tuple[np.ndarray | Float[Array, "B T half"], float]:
    """(inverse frequencies, of all tokens or of each, factor on cos and sin) of a rope type other than "default".

    `inverse` are the base frequencies, float64 [h/2], of `theta`; `lengths` the original context and the model's
    max_position_embeddings. 'dynamic' and 'longrope' rescale by the length of the token's own document, so that a
    document means the same packed and alone.
    """
    original_length, max_length = lengths
    match kind:
        case "linear":
            return inverse / numbers["factor"], 1.0
        case "ntk":
            pairs, dim = np.arange(0, 2 * len(inverse), 2, dtype=np.float64), 2 * len(inverse)
            return 1.0 / (theta * numbers["alpha"] ** (dim / (dim - 2))) ** (pairs / dim), 1.0
        case "proportional":
            rotated = int(numbers.get("partial_rotary_factor", 1.0) * 2 * len(inverse) // 2)
            return np.where(np.arange(len(inverse)) < rotated, inverse, 0) / numbers.get("factor", 1.0), 1.0
        case "llama3":
            return llama3(inverse, numbers, original_length), 1.0
        case "yarn":
            return yarn(inverse, numbers, original_length, theta)
        case "dynamic":
            of_token = document_lengths(positions, segment_ids)
            return dynamic(of_token, numbers["factor"], original_length, theta, 2 * len(inverse)), 1.0
        case "longrope":
            is_long = document_lengths(positions, segment_ids) > original_length
            magnitude = longrope_magnitude(numbers, original_length, max_length)
            return longrope(is_long, inverse, numbers), magnitude
    raise AssertionError(kind)


def longrope_magnitude(numbers: dict[str, float], original_length: int, max_length: int) -> float:
    """LongRoPE's factor on cos and sin."""
    if (given := numbers.get("attention_factor")) is not None:
        return given
    stretch = numbers.get("factor") or max_length / original_length
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original_length))


def llama3(inverse: np.ndarray, numbers: dict[str, float], original_length: int) -> np.ndarray:
    """Llama 3's inverse frequencies: low ones divided by `factor`, high ones unchanged, those between blended."""
    factor, low, high = numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    smooth = (original_length / wavelength - low) / max(high - low, 1e-9)  # Llama 4's are equal: none is between
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = np.where(wavelength > original_length / low, inverse / factor, inverse)
    between = (wavelength >= original_length / high) & (wavelength <= original_length / low)
    return np.where(between, blended, scaled)


def yarn(
    inverse: np.ndarray, numbers: dict[str, float], original_length: int, theta: float
) -> tuple[np.ndarray, float]:
    """YaRN's inverse frequencies, and its factor on cos and sin."""
    factor, pairs = numbers["factor"], len(inverse)

    def magnitude(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    attention = numbers.get("attention_factor")
    if attention is None:
        m, m_all = numbers.get("mscale"), numbers.get("mscale_all_dim")
        attention = magnitude(factor, m) / magnitude(factor, m_all) if m and m_all else magnitude(factor)

    def dimension(rotations: float) -> float:
        return 2 * pairs * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(numbers.get("beta_fast") or 32.0), dimension(numbers.get("beta_slow") or 1.0)
    if numbers.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), attention


def document_lengths(positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's document length, so far as this row shows it: its segment's largest position, plus one."""

    def row(positions: Int[Array, "T"], segments: Int[Array, "T"]) -> Int[Array, "T"]:
        longest = jnp.zeros(segments.shape[0] + 1, jnp.int32).at[segments].max(positions + 1)
        return longest[segments]

    return jax.vmap(row)(positions, segment_ids)


def dynamic(
    lengths: Int[Array, "B T"], factor: float, original_length: int, theta: float, dim: int
) -> Float[Array, "B T half"]:
    """Dynamic NTK's inverse frequencies of every token, by the length of its document."""
    longest = jnp.maximum(lengths, original_length).astype(jnp.float32)
    thetas = theta * (factor * longest / original_length - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / thetas[..., None] ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def longrope(is_long: Bool[Array, "B T"], inverse: np.ndarray, numbers: dict[str, Any]) -> Float[Array, "B T half"]:
    """LongRoPE's inverse frequencies of every token, by whether its document exceeds the original context."""
    short, long = (np.asarray(numbers[name], np.float64) for name in LONGROPE_FACTORS)
    assert len(short) == len(long) == len(inverse), f"{len(short)} and {len(long)} factors for {len(inverse)} pairs"
    short, long = (jnp.asarray(inverse / factors, jnp.float32) for factors in (short, long))
    return jnp.where(is_long[..., None], long, short)
