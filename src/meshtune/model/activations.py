"""The functions between the projections of feed-forward networks."""

from __future__ import annotations

from functools import partial
from statistics import NormalDist
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
XIELU = "xielu"  # the activation with parameters of its own


def xielu(x: Array, node: Tree) -> Array:
    """The activation of https://arxiv.org/abs/2411.13010, with the trained alpha_p and alpha_n [1] of one layer and its
    constants beta and eps [1].

    a x^2 + beta x for positive x, b (exp(min(x, eps)) - 1 - x) + beta x for others, where a is softplus of alpha_p, and
    b is beta more than softplus of alpha_n. Computed in float32, returned in x's dtype.
    """
    wide = x.astype(jnp.float32)
    a, softplus = (jax.nn.softplus(node[name].astype(jnp.float32)) for name in ("alpha_p", "alpha_n"))
    beta, eps = (jax.lax.stop_gradient(node[name]).astype(jnp.float32) for name in ("beta", "eps"))
    below = (beta + softplus) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
    return (jnp.where(wide > 0, a * jnp.square(wide), below) + beta * wide).astype(x.dtype)


def gaussian_topk(x: Array, sparsity: float) -> Array:
    """What the numbers of a token (the last axis) have above a limit, zero for those below: the limit that a share
    `sparsity` of numbers with their mean and standard deviation, normally distributed, is below (Gemma 3n).

    The limit is computed in float32; the result is in x's dtype.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    # Chosen before the root, whose derivative at zero is infinite: padding may be zero.
    deviation = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
    return jax.nn.relu(wide - (mean + deviation * NormalDist().inv_cdf(sparsity))).astype(x.dtype)


def xielu_params() -> Tree:
    """The parameters of `xielu` of one layer."""
    trained = ArraySpec((1,), "float32", ("whole",), role="vector")
    constant = ArraySpec((1,), "float32", ("whole",), "ones", role="buffer")
    return {"alpha_p": trained, "alpha_n": trained, "beta": constant, "eps": constant}
