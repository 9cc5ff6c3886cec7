"""The gated feed-forward layer (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.linear import linear, site_key
from meshtune.model.spec import ModelSpec

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def mlp(x: Float[Array, "B T D"], node: Tree, spec: ModelSpec, key: Array | None = None) -> Float[Array, "B T D"]:
    """down(activation(gate(x)) * up(x))."""
    gate = linear(x, node["gate"], site_key(key, "gate"))
    up = linear(x, node["up"], site_key(key, "up"))
    return linear(ACTIVATIONS[spec.activation](gate) * up, node["down"], site_key(key, "down"))
