"""Per-layer embeddings: every layer is given a narrow vector of each token, from a table and from the token's embedding
(Gemma 3n and 4, https://ai.google.dev/gemma/docs/gemma-3n)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.activations import ACTIVATIONS, ActivationName
from meshtune.model.block import Activation, Context, Cost, Divisor, FeedForward, Hidden, Output
from meshtune.model.cache import LayerCache
from meshtune.model.compute import Compute
from meshtune.model.embedding import embedded
from meshtune.model.inputs import Inputs
from meshtune.model.linear import linear, linear_params, site_key, with_gathered_columns
from meshtune.model.norm import NormSpec
from meshtune.model.side import BY_LAYER

NAME = "per_layer"  # of the side input, of the node of its parameters, and of the block in a layer


@dataclasses.dataclass(frozen=True)
class PerLayerEmbedding:
    """A vector of `width` numbers for every token and each of `layers` layers.

    It is the sum of a row of a table of `vocab` rows, times sqrt(width), and of a normalised projection of the token's
    embedding, over sqrt(2). Tokens beyond the table have its row 0.
    """

    vocab: int
    layers: int
    width: int
    norm: NormSpec
    name: ClassVar[str] = NAME

    def params(self, embed: int) -> Tree:
        """table/weight [V, L P], projection/weight [L P, D], norm/weight [P]."""
        table = ArraySpec((self.vocab, self.layers * self.width), "float32", ("vocab", "embed"), role="table")
        return {
            "table": {"weight": table},
            "projection": linear_params((self.layers * self.width, "whole"), (embed, "embed"), bias=False),
            "norm": self.norm.params(self.width, "whole"),
        }

    def apply(self, node: Tree, inputs: Inputs, embeds: Hidden, compute: Compute) -> Tree:
        """The vectors [L, B, T, P] in the dtype of the embeddings."""
        tokens = jnp.where(inputs.tokens < self.vocab, inputs.tokens, 0)
        rows = embedded(node["table"]["weight"], tokens, compute.layout).astype(embeds.dtype)
        rows = rows * jnp.asarray(self.width**0.5, rows.dtype)
        projected = linear(embeds, with_gathered_columns(node["projection"], compute.layout)) * embeds.shape[-1] ** -0.5
        shape = (*inputs.tokens.shape, self.layers, self.width)
        projected = self.norm(projected.reshape(shape), node["norm"])
        vectors = (projected + rows.reshape(shape)) * jnp.asarray(2**-0.5, rows.dtype)
        return {BY_LAYER: {NAME: jnp.moveaxis(vectors, 2, 0)}}

    def divisors(self) -> tuple[Divisor, ...]:
        return (Divisor("tp", "vocabulary of per-layer embeddings", self.vocab),)


@dataclasses.dataclass(frozen=True)
class PerLayerSpec(FeedForward):
    """norm(out(activation(gate(x)) * v)), where v is the token's vector for this layer, of `width` numbers."""

    width: int
    norm: NormSpec
    activation: ActivationName = "gelu_tanh"
    name: ClassVar[str] = NAME

    def params(self, embed: int) -> Tree:
        """gate/weight [P, D], out/weight [D, P], norm/weight [D]."""
        narrow, wide = (self.width, "whole"), (embed, "embed")
        return {
            "gate": linear_params(narrow, wide, bias=False),
            "out": linear_params(wide, narrow, bias=False),
            "norm": self.norm.params(embed, "embed"),
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        key = context.key
        gate = ACTIVATIONS[self.activation](linear(x, node["gate"], site_key(key, "gate")))
        y = linear(gate * context.side[NAME].astype(gate.dtype), node["out"], site_key(key, "out"))
        return Output(self.norm(y, node["norm"]), cache, {})

    def side_inputs(self) -> frozenset[str]:
        return frozenset((NAME,))

    def divisors(self) -> tuple[Divisor, ...]:
        return ()

    def cost(self, embed: int) -> Cost:
        narrow = Activation("whole", self.width, 1, kept=True, products=1, elementwise=1)
        return Cost(2 * embed * self.width, (narrow, narrow, Activation("embed", embed, 1, kept=True, elementwise=1)))
