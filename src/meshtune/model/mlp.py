"""The dense feed-forward network, gated (https://arxiv.org/abs/2002.05202) or plain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import jax
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.block import Activation, Context, Cost, Divisor, Hidden, Output, RowParams, Sums
from meshtune.model.cache import LayerCache
from meshtune.model.linear import linear, linear_params, site_key

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclasses.dataclass(frozen=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)); without a gate, down(activation(up(x))). `width` is F."""

    width: int
    activation: ActivationName = "silu"
    bias: bool = False
    gated: bool = True
    name: ClassVar[str] = "mlp"

    def params(self, embed: int) -> Tree:
        """{gate, up} [F, D] and down [D, F]."""
        wide, narrow = (self.width, "ffn"), (embed, "embed")
        into = ("gate", "up") if self.gated else ("up",)
        return {n: linear_params(wide, narrow, self.bias) for n in into} | {
            "down": linear_params(narrow, wide, self.bias)
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        """The network's result."""
        key, activation = context.key, ACTIVATIONS[self.activation]
        if self.gated:
            gate = linear(x, node["gate"], site_key(key, "gate"))
            up = linear(x, node["up"], site_key(key, "up"))
            wide = activation(gate) * up
        else:
            wide = activation(linear(x, node["up"], site_key(key, "up")))
        return Output(linear(wide, node["down"], site_key(key, "down")), cache, {})

    def side_inputs(self) -> frozenset[str]:
        return frozenset()

    def sums(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def loss(self, sums: Sums) -> Array | None:
        return None

    def row_params(self) -> RowParams:
        return RowParams(frozenset(), frozenset(("gate", "up", "down") if self.gated else ("up", "down")))

    def divisors(self) -> tuple[Divisor, ...]:
        return (Divisor("tp", "ffn width", self.width),)

    def cost(self, embed: int) -> Cost:
        matrices = 3 if self.gated else 2
        wide = Activation("ffn", self.width, self.width, kept=True, products=1, elementwise=1)
        return Cost(matrices * embed * self.width, (wide,) * (matrices - 1) + (wide._replace(kept=False),))
