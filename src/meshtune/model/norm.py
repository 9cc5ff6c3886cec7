"""Normalisation of vectors: root mean square (https://arxiv.org/abs/1910.07467) and layer norm."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree

NormKind = Literal["rms", "rms_offset", "rms_plain", "layer", "layer_offset", "layer_scale", "layer_plain"]


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """A norm over the last axis.

    `rms` multiplies by its weight, `rms_offset` by one plus its weight (Gemma), which starts at zero; `layer` is layer
    norm with weight and bias, `layer_offset` with one plus its weight (Nemotron), `layer_scale` without the bias. The
    `plain` kinds have no parameters.
    """

    eps: float
    kind: NormKind = "rms"

    @property
    def has_offset(self) -> bool:
        """Whether one is added to the weight."""
        return self.kind in ("rms_offset", "layer_offset")

    def params(self, width: int, axis: str, heads: tuple[int, str] | None = None) -> Tree:
        """Its parameters for vectors of `width` numbers, separate ones for each of `heads` (their number, the logical
        axis); none of a plain norm."""
        if self.kind in ("rms_plain", "layer_plain"):
            return {}
        shape, axes = ((width,), (axis,)) if heads is None else ((heads[0], width), (heads[1], axis))
        init = "zeros" if self.has_offset else "ones"
        tree = {"weight": ArraySpec(shape, "float32", axes, init, role="vector")}
        if self.kind in ("layer", "layer_offset"):
            tree["bias"] = ArraySpec(shape, "float32", axes, "zeros", role="vector")
        return tree

    def __call__(self, x: Float[Array, "*B D"], node: Tree) -> Float[Array, "*B D"]:
        """Computed in float32, returned in x's dtype. `node` holds the parameters."""
        wide = x.astype(jnp.float32)
        if self.kind.startswith("layer"):
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if "weight" in node:
            weight = node["weight"].astype(jnp.float32)
            wide = wide * (1.0 + weight if self.has_offset else weight)
        if "bias" in node:
            wide = wide + node["bias"].astype(jnp.float32)
        return wide.astype(x.dtype)
