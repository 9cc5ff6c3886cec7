"""The dense feed-forward network, gated (https://arxiv.org/abs/2002.05202) or plain, and its activations."""

from __future__ import annotations

import dataclasses
from functools import partial
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.block import Activation, Context, Cost, Divisor, FeedForward, Hidden, Output
from meshtune.model.cache import LayerCache
from meshtune.model.linear import linear, linear_params, site_key

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
ActivationName = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
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


@dataclasses.dataclass(frozen=True)
class MlpSpec(FeedForward):
    """down(activation(gate(x)) * up(x)); without a gate, down(activation(up(x))). `width` is F.

    With `packed` one projection `gate_up` [2 F, D] computes both: a row of the gate, then a row of up, in turn, so that
    tp, which splits the rows, gives every device both of a pair. The input of the activation is multiplied by
    `gate_scale`, the result by `out_scale`. With `sparsity` only about the remaining share of a token's inputs of the
    activation is not zero (see `gaussian_topk`). `clipped` is that of linear_params.
    """

    width: int
    activation: ActivationName = "silu"
    bias: bool = False
    gated: bool = True
    packed: bool = False
    gate_scale: float | None = None
    out_scale: float | None = None
    sparsity: float | None = None
    clipped: bool = False
    name: ClassVar[str] = "mlp"

    def __post_init__(self):
        assert self.gated or not self.packed, "only a gate and up can be packed"

    @property
    def into(self) -> dict[str, int]:
        """The rows of each projection of the input."""
        if self.packed:
            return {"gate_up": 2 * self.width}
        return dict.fromkeys(("gate", "up") if self.gated else ("up",), self.width)

    def params(self, embed: int) -> Tree:
        """{gate, up} [F, D], or gate_up [2 F, D], and down [D, F]."""
        narrow = (embed, "embed")
        options: dict[str, bool] = {"bias": self.bias, "clipped": self.clipped}
        tree = {name: linear_params((rows, "ffn"), narrow, **options) for name, rows in self.into.items()}
        tree["down"] = linear_params(narrow, (self.width, "ffn"), **options)
        if self.activation == XIELU:
            tree[XIELU] = xielu_params()
        return tree

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """The network's result."""
        key = context.key
        activation = partial(xielu, node=node[XIELU]) if self.activation == XIELU else ACTIVATIONS[self.activation]
        products = [linear(x, node[name], site_key(key, name)) for name in self.into]
        if self.packed:
            pairs = products[0].reshape(*x.shape[:-1], self.width, 2)
            products = [pairs[..., 0], pairs[..., 1]]
        gate = products[0] if self.gate_scale is None else products[0] * self.gate_scale
        wide = activation(gate if self.sparsity is None else gaussian_topk(gate, self.sparsity))
        if self.gated:
            wide = wide * products[1]
        y = linear(wide, node["down"], site_key(key, "down"))
        return Output(y if self.out_scale is None else y * self.out_scale, cache, {})

    def divisors(self) -> tuple[Divisor, ...]:
        return (Divisor("tp", "ffn width", self.width),)

    def cost(self, embed: int) -> Cost:
        matrices = 3 if self.gated else 2
        wide = Activation("ffn", self.width, self.width, kept=True, products=1, elementwise=1)
        return Cost(matrices * embed * self.width, (wide,) * (matrices - 1) + (wide._replace(kept=False),))
