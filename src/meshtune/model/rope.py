"""Rotary position embedding (https://arxiv.org/abs/2104.09864). Its context extensions are in rope_scaling.py."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshtune.model.rope_scaling import dynamic, llama3, longrope_magnitude, yarn

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "ntk", "proportional"]
LONGROPE_FACTORS = ("short_factor", "long_factor")  # of documents within the original context, and of longer ones


@dataclasses.dataclass(frozen=True, order=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` numbers of a head.

    `kind` is the HF rope type ("ntk": dynamic with `alpha`). Of "proportional" all pairs beyond a share
    `partial_rotary_factor` of them have the frequency zero. `parameters` holds that type's own numbers (factor,
    low_freq_factor, ...), sorted by name; longrope's factors are a number for each pair.
    `original_length` is the context the base frequencies were trained for, `max_length` the model's
    max_position_embeddings. Pairs are (i, i + dim/2) or, `interleaved`, (2i, 2i + 1).
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    parameters: tuple[tuple[str, float | tuple[float, ...]], ...] = ()
    original_length: int = 0
    max_length: int = 0
    interleaved: bool = False


def frequencies(rope: RopeSpec) -> tuple[np.ndarray, float]:
    """(inverse frequencies float64 [h/2], factor on cos and sin); 'dynamic' and 'longrope' rescale them later, by
    length."""
    numbers: dict[str, float] = {name: value for name, value in rope.parameters if not isinstance(value, tuple)}
    theta = rope.theta
    if rope.kind == "ntk":
        theta *= numbers["alpha"] ** (rope.dim / (rope.dim - 2))
    inverse = 1.0 / theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    match rope.kind:
        case "default" | "dynamic" | "ntk":
            return inverse, 1.0
        case "longrope":
            return inverse, longrope_magnitude(numbers, rope.original_length, rope.max_length)
        case "linear":
            return inverse / numbers["factor"], 1.0
        case "proportional":
            rotated = int(numbers.get("partial_rotary_factor", 1.0) * rope.dim // 2)
            inverse[rotated:] = 0
            return inverse / numbers.get("factor", 1.0), 1.0
        case "llama3":
            return llama3(inverse, numbers, rope.original_length), 1.0
        case "yarn":
            return yarn(inverse, numbers, rope.original_length, rope.theta)


def angles(
    rope: RopeSpec, positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """cos and sin of every token's rotation, float32.

    'dynamic' and 'longrope' rescale by the length of the token's own document (the largest position in its segment),
    so that a document means the same packed and alone.
    """
    inverse, factor = frequencies(rope)
    phase = positions.astype(jnp.float32)[..., None]
    if rope.kind == "dynamic":
        lengths, stretch = _document_lengths(positions, segment_ids), dict(rope.parameters)["factor"]
        assert isinstance(stretch, float)
        phase = phase * dynamic(lengths, stretch, rope.original_length, rope.theta, rope.dim)
    elif rope.kind == "longrope":
        is_long = _document_lengths(positions, segment_ids) > rope.original_length
        short, long = (jnp.asarray(inverse / _pair_factors(rope, name), jnp.float32) for name in LONGROPE_FACTORS)
        phase = phase * jnp.where(is_long[..., None], long, short)
    else:
        phase = phase * jnp.asarray(inverse, jnp.float32)
    return jnp.cos(phase) * factor, jnp.sin(phase) * factor


def rotate(
    x: Float[Array, "B T H h"],
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B T H h"]:
    """Rotates the pairs (i, i + half) of each head, or (2i, 2i + 1) if `interleaved`; numbers beyond stay as they are.

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


def _pair_factors(rope: RopeSpec, name: str) -> np.ndarray:
    factors = dict(rope.parameters)[name]
    assert isinstance(factors, tuple)
    assert len(factors) == rope.dim // 2, f"{len(factors)} factors for {rope.dim // 2} pairs"
    return np.asarray(factors, np.float64)


def _document_lengths(positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's document length, so far as this row shows it: its segment's largest position, plus one."""

    def row(positions: Int[Array, "T"], segments: Int[Array, "T"]) -> Int[Array, "T"]:
        longest = jnp.zeros(segments.shape[0] + 1, jnp.int32).at[segments].max(positions + 1)
        return longest[segments]

    return jax.vmap(row)(positions, segment_ids)
