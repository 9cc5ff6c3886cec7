"""Several residual streams of which a layer computes one (alternating updates, AltUp:
https://arxiv.org/abs/2301.13310).

What runs through the layers is [B, T, S, D]. Before a layer all S streams are predicted from each other; the layer's
blocks read and change the `active` one alone; and its change corrects the predictions of all.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout
from meshtune.model.block import Activation, Cost, Hidden
from meshtune.model.linear import linear, linear_params, with_gathered_columns
from meshtune.model.norm import NormSpec

Streams = Float[Array, "B T S D"]

ENTER, LEAVE = "streams_in", "streams_out"  # the nodes of the projections at the top of the tree
LEAST_SQUARE = 1e-5  # of a projected stream, by the root of which it is divided


@dataclasses.dataclass(frozen=True)
class StreamsSpec:
    """`count` streams, of which the first enters as the token's embedding, and each other as a projection of it with
    the same root mean square. What leaves is their mean, of projections again of all but the first."""

    count: int

    def params(self, embed: int) -> Tree:
        """A linear layer [D, D] for each stream but the first, by its number; those that enter and those that leave
        alike."""
        size = embed, "embed"
        return {str(number): linear_params((embed, "whole"), size, bias=False) for number in range(1, self.count)}

    def enter(self, x: Hidden, node: Tree, layout: Layout | None) -> Streams:
        """The streams of embeddings; `node` holds the projections."""
        projected = (linear(x, with_gathered_columns(node[str(number)], layout)) for number in range(1, self.count))
        return jnp.stack([x, *(_with_size_of(x, stream) for stream in projected)], axis=-2)

    def leave(self, streams: Streams, node: Tree, layout: Layout | None) -> Hidden:
        """A single hidden state of the streams behind the last layer."""
        first = streams[..., 0, :]
        projected = (
            linear(streams[..., number, :], with_gathered_columns(node[str(number)], layout))
            for number in range(1, self.count)
        )
        total = sum((_with_size_of(first, stream) for stream in projected), first)
        return total * jnp.asarray(1 / self.count, total.dtype)


def _with_size_of(x: Hidden, stream: Hidden) -> Hidden:
    """A stream, scaled to the root mean square of x."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    # Chosen before the root, whose derivative at zero is infinite: padding may be zero.
    size = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    projected = jnp.mean(jnp.square(stream.astype(jnp.float32)), axis=-1, keepdims=True)
    return (stream * size / jnp.sqrt(jnp.maximum(projected, LEAST_SQUARE))).astype(stream.dtype)


@dataclasses.dataclass(frozen=True)
class AltUpSpec:
    """The prediction and correction around one layer.

    A router, the tanh of a linear layer of the normalised active stream, weighs the coefficients. Coefficients are
    limited to [-clip, clip] (None: not at all); those of the prediction are trained as if they were not, as in
    transformers, whose training clips them in place. With `scaled` what is added behind the layer (model.per_layer)
    is computed from the corrected active stream times a trained vector.
    """

    count: int
    active: int
    norm: NormSpec
    clip: float | None = None
    scaled: bool = True
    name: ClassVar[str] = "streams"

    def __post_init__(self):
        assert 0 <= self.active < self.count, (self.active, self.count)

    def params(self, embed: int) -> Tree:
        """router [S, D] and its norm [D], predict [S S, S], correct [S, S], scale [D].

        They are vectors to methods and optimizers: trained in full tuning, never quantised, adapted or projected.
        """

        def coefficients(rows: int, columns: int, axis: str = "whole") -> Tree:
            return {"weight": ArraySpec((rows, columns), "float32", ("whole", axis), role="vector")}

        return {
            "router": coefficients(self.count, embed, "embed"),
            "router_norm": self.norm.params(embed, "embed"),
            "predict": coefficients(self.count**2, self.count),
            "correct": coefficients(self.count, self.count),
            "scale": {"weight": ArraySpec((embed,), "float32", ("embed",), "zeros", role="vector")},
        }

    def predict(self, streams: Streams, node: Tree) -> Streams:
        """Every stream with the sum of all, each times a coefficient of the token."""
        weight = node["predict"]["weight"]
        if self.clip is not None:
            weight = weight + jax.lax.stop_gradient(jnp.clip(weight, -self.clip, self.clip) - weight)
        routed = self._routed(self.active_of(streams), node)
        # Of row i S + j of the weight: from stream j to stream i.
        into = linear(routed, {"weight": weight}).reshape(*routed.shape[:-1], self.count, self.count)
        return streams + jnp.sum(into[..., None] * streams[..., None, :, :], axis=-2)

    def correct(self, predicted: Streams, y: Hidden, node: Tree) -> Streams:
        """The predictions, each with the error of the active one, times a coefficient of the token."""
        weight = node["correct"]["weight"]
        if self.clip is not None:
            weight = jnp.clip(weight, -self.clip, self.clip)
        coefficients = linear(self._routed(y, node), {"weight": weight}) + 1
        error = y - self.active_of(predicted)
        return predicted + coefficients[..., None] * error[..., None, :]

    def active_of(self, streams: Streams) -> Hidden:
        """The stream that the blocks of the layer compute with."""
        return streams[..., self.active, :]

    def output(self, corrected: Streams, node: Tree) -> Hidden:
        """The corrected active stream, as what is added behind the layer reads it."""
        active = self.active_of(corrected)
        return active * node["scale"]["weight"].astype(active.dtype) if self.scaled else active

    def with_added(self, corrected: Streams, y: Hidden) -> Streams:
        """With y added to all streams but the first."""
        return jnp.concatenate([corrected[..., :1, :], corrected[..., 1:, :] + y[..., None, :]], axis=-2)

    def cost(self, embed: int) -> Cost:
        """Of elementwise operations on all streams, for the most part."""
        streams = Activation("embed", self.count * embed, 1, kept=False, products=0, elementwise=2)
        return Cost(2 * self.count * embed + self.count**2 * (self.count + 1), (streams, streams))

    def _routed(self, x: Hidden, node: Tree) -> Float[Array, "B T S"]:
        """The router's weights, one a stream, in x's dtype."""
        narrow = self.norm(x, node["router_norm"]) * jnp.asarray(1 / x.shape[-1], x.dtype)
        return jnp.tanh(linear(narrow, node["router"]).astype(jnp.float32)).astype(x.dtype)
