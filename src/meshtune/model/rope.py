"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extensions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LONGROPE_FACTORS = ("short_factor", "long_factor")  # of documents within the original context, and of longer ones


def scale_frequencies(
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


# How several positions of a token share the frequencies: parts of them for each, one after another or by turns; or by
# turns, with the pairs of a position one after another; or all positions with the same frequencies, of which there are
# as many less.
RopeAxes = Literal["blocks", "interleaved", "strided", "axial"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "ntk", "proportional"]


@dataclasses.dataclass(frozen=True, order=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` numbers of a head.

    `kind` is the HF rope type ("ntk": dynamic with `alpha`). Of "proportional" all pairs beyond a share
    `partial_rotary_factor` of them have the frequency zero. `parameters` holds that type's own numbers (factor,
    low_freq_factor, ...), sorted by name; longrope's factors are a number for each pair.
    `original_length` is the context the base frequencies were trained for, `max_length` the model's
    max_position_embeddings. Pairs are (i, i + dim/2) or, `interleaved`, (2i, 2i + 1).

    With `sections` a token has a position for each of them, as M-RoPE's time, row and column
    (https://arxiv.org/abs/2409.12191), and so many pairs turn by each, as `axes` says. Where they are all equal, and so
    in text, that is the ordinary embedding.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    parameters: tuple[tuple[str, float | tuple[float, ...]], ...] = ()
    original_length: int = 0
    max_length: int = 0
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    axes: RopeAxes = "blocks"

    @property
    def axis_of_pair(self) -> np.ndarray:
        """Which of its positions turns each pair, int [dim/2]."""
        assert 2 * sum(self.sections) == self.dim, (self.sections, self.dim)
        if self.axes != "interleaved":
            return np.repeat(np.arange(len(self.sections)), self.sections)
        pairs = np.arange(self.dim // 2)
        axis = pairs % len(self.sections)
        return np.where(pairs < len(self.sections) * np.asarray(self.sections)[axis], axis, 0)


def angles(
    rope: RopeSpec, turns: Int[Array, "B T *n"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """cos and sin of every token's rotation by `turns` steps of each frequency, float32; `turns` may be [B, T, n] for a
    rope with n sections.

    'dynamic' and 'longrope' rescale by the length of the token's own document (the largest position in its segment),
    so that a document means the same packed and by itself.
    """
    width = rope.dim // len(rope.sections) if rope.axes == "axial" else rope.dim
    inverse, factor = 1.0 / rope.theta ** (np.arange(0, width, 2, dtype=np.float64) / width), 1.0
    inverse = np.tile(inverse, rope.dim // width)
    if rope.axes == "strided":
        inverse = inverse.reshape(-1, len(rope.sections)).T.reshape(-1)
    if rope.kind != "default":
        numbers, lengths = dict(rope.parameters), (rope.original_length, rope.max_length)
        inverse, factor = scale_frequencies(rope.kind, inverse, numbers, rope.theta, lengths, positions, segment_ids)
    steps = turns[..., None] if turns.ndim == 2 else jnp.take(turns, rope.axis_of_pair, axis=2)
    phase = steps.astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def rotate(
    x: Float[Array, "B T H h"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T H h"]:
    """Rotates the pairs (i, i + half) of each head, or (2i, 2i + 1) if `interleaved`; numbers beyond stay unchanged.

    Computed in float32, returned in x's dtype.
    """
    width = 2 * cos.shape[-1]
    x, unrotated = x[..., :width], x[..., width:]
    wide = x.astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    pair = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(pair, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    turned = turned.astype(x.dtype)
    return turned if unrotated.shape[-1] == 0 else jnp.concatenate([turned, unrotated], axis=-1)
