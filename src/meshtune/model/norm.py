"""Normalisation of vectors: root mean square (https://arxiv.org/abs/1910.07467) and layer norm."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """A norm over the last axis.

    `rms` multiplies by its weight, `rms_offset` by one plus its weight (Gemma), which starts at zero; `layer` is layer
    norm with weight and bias, `layer_scale` without the bias.
    """

    eps: float
    kind: Literal["rms", "rms_offset", "layer", "layer_scale"] = "rms"

    def params(self, width: int, axis: str) -> Tree:
        """Its parameters for vectors of `width` numbers."""
        init = "zeros" if self.kind == "rms_offset" else "ones"
        weight = {"weight": ArraySpec((width,), "float32", (axis,), init, role="vector")}
        if self.kind != "layer":
            return weight
        return weight | {"bias": ArraySpec((width,), "float32", (axis,), "zeros", role="vector")}

    def __call__(self, x: Float[Array, "*B D"], node: Tree) -> Float[Array, "*B D"]:
        """Computed in float32, returned in x's dtype."""
        weight = node["weight"].astype(jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, weight, self.eps)
        if self.kind == "rms_offset":
            return rms_norm(x, 1.0 + weight, self.eps)
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps) * weight
        return (wide + node["bias"].astype(jnp.float32) if "bias" in node else wide).astype(x.dtype)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*B D"]:
    """x / rms(x) * weight over the last axis, computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
