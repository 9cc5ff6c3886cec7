"""Rotary position embedding (https://arxiv.org/abs/2104.09864). Its context extensions are in rope_scaling.py."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshtune.model.rope_scaling import extended

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "ntk", "proportional"]


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


def angles(
    rope: RopeSpec, turns: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """cos and sin of every token's rotation by `turns` steps of each frequency, float32.

    'dynamic' and 'longrope' rescale by the length of the token's own document (the largest position in its segment),
    so that a document means the same packed and alone.
    """
    inverse, factor = 1.0 / rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim), 1.0
    if rope.kind != "default":
        numbers, lengths = dict(rope.parameters), (rope.original_length, rope.max_length)
        inverse, factor = extended(rope.kind, inverse, numbers, rope.theta, lengths, positions, segment_ids)
    phase = turns.astype(jnp.float32)[..., None] * jnp.asarray(inverse, jnp.float32)
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
