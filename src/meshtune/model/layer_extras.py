"""Parts that Gemma 3n and Gemma 4 add around the blocks of a layer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout
from meshtune.model.block import (
    BY_LAYER,
    STREAMS,
    Activation,
    Block,
    Context,
    Cost,
    Divisor,
    FeedForward,
    Hidden,
    Output,
)
from meshtune.model.cache import LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, embed_tokens
from meshtune.model.linear import linear, linear_params, site_key, with_gathered_columns
from meshtune.model.mlp import ACTIVATIONS, ActivationName
from meshtune.model.norm import NormSpec


@dataclasses.dataclass(frozen=True)
class LaurelSpec(FeedForward):
    """x + norm(right(left(x))), with `rank` numbers between the two."""

    rank: int
    norm: NormSpec
    name: ClassVar[str] = "laurel"

    def params(self, embed: int) -> Tree:
        """left/weight [R, D], right/weight [D, R], norm/weight [D]."""
        narrow, wide = (self.rank, "whole"), (embed, "embed")
        return {
            "left": linear_params(narrow, wide, bias=False),
            "right": linear_params(wide, narrow, bias=False),
            "norm": self.norm.params(embed, "embed"),
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        key = context.key
        narrow = linear(x, node["left"], site_key(key, "left"))
        wide = linear(narrow, node["right"], site_key(key, "right"))
        return Output(x + self.norm(wide, node["norm"]), cache, {})

    def divisors(self) -> tuple[Divisor, ...]:
        return ()

    def cost(self, embed: int) -> Cost:
        narrow = Activation("whole", self.rank, 1, kept=True)
        return Cost(2 * embed * self.rank, (narrow, Activation("embed", embed, 1, kept=True, elementwise=1)))


Streams = Float[Array, "B T S D"]

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
    name: ClassVar[str] = STREAMS

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
        routed = self._route_streams(self.active_of(streams), node)
        # Of row i S + j of the weight: from stream j to stream i.
        into = linear(routed, {"weight": weight}).reshape(*routed.shape[:-1], self.count, self.count)
        return streams + jnp.sum(into[..., None] * streams[..., None, :, :], axis=-2)

    def correct(self, predicted: Streams, y: Hidden, node: Tree) -> Streams:
        """The predictions, each with the error of the active one, times a coefficient of the token."""
        weight = node["correct"]["weight"]
        if self.clip is not None:
            weight = jnp.clip(weight, -self.clip, self.clip)
        coefficients = linear(self._route_streams(y, node), {"weight": weight}) + 1
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

    def _route_streams(self, x: Hidden, node: Tree) -> Float[Array, "B T S"]:
        """The router's weights, one a stream, in x's dtype."""
        narrow = self.norm(x, node["router_norm"]) * jnp.asarray(1 / x.shape[-1], x.dtype)
        return jnp.tanh(linear(narrow, node["router"]).astype(jnp.float32)).astype(x.dtype)


SCALAR = "scalar"  # the key of the number that multiplies the stream


@dataclasses.dataclass(frozen=True)
class LayerExtras:
    """Parts around the blocks of a layer; each may be absent.

    `laurel`, of the mixer's input, is added to the stream together with the mixer's result, and the sum divided by the
    root of two. `per_layer` is added behind the feed-forward network, and is computed from the stream there
    (PerLayerSpec). With `scalar` the stream that leaves the layer is multiplied by a number of the model that is not
    trained. With `streams` there are several streams: the blocks change one, and `per_layer` the others.
    """

    laurel: LaurelSpec | None = None
    streams: AltUpSpec | None = None
    per_layer: FeedForward | None = None
    scalar: bool = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in (self.laurel, self.per_layer) if block is not None)

    @property
    def parts(self) -> tuple[Block | AltUpSpec, ...]:
        """All that have parameters and costs."""
        return (*self.blocks, *(() if self.streams is None else (self.streams,)))

    def params(self, embed: int) -> Tree:
        """ArraySpecs of one layer, by the names of the parts."""
        tree: Tree = {part.name: part.params(embed) for part in self.parts}
        if self.scalar:
            tree[SCALAR] = {"weight": ArraySpec((1,), "float32", ("whole",), "ones", role="buffer")}
        return tree

    def enter(self, x: Hidden | Streams, node: Tree) -> tuple[Hidden, Streams | None]:
        """(the stream that the blocks read, all of several), from the input of the layer."""
        if self.streams is None:
            return x, None
        predicted = self.streams.predict(x, node[self.streams.name])
        return self.streams.active_of(predicted), predicted

    def add_laurel(self, h: Hidden, x: Hidden, node: Tree, context: Context) -> Hidden:
        """The stream with the mixer's result, h, and `laurel` of the mixer's input x."""
        if self.laurel is None:
            return h
        y = self.laurel.apply(x, node[self.laurel.name], context.for_block(self.laurel.name), None).y
        return ((h + y).astype(jnp.float32) * 2**-0.5).astype(h.dtype)

    def leave(self, y: Hidden, predicted: Streams | None, node: Tree, context: Context) -> Hidden | Streams:
        """The output of the layer, from the stream behind the feed-forward network and the streams of `enter`."""
        streams, active = self.streams, y
        if streams is not None:
            assert predicted is not None
            y = streams.correct(predicted, y, node[streams.name])
            active = streams.output(y, node[streams.name])
        if self.per_layer is not None:
            name = self.per_layer.name
            added = self.per_layer.apply(active, node[name], context.for_block(name), None).y
            y = y + added if streams is None else streams.with_added(y, added)
        return y * jax.lax.stop_gradient(node[SCALAR]["weight"]).astype(y.dtype) if self.scalar else y


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
        rows = embed_tokens(node["table"]["weight"], tokens, compute.layout).astype(embeds.dtype)
        if inputs.visual is not None:  # whose tokens have the row of padding, which nothing trains
            rows = jnp.where(inputs.visual.index[..., None] == 0, rows, lax.stop_gradient(rows))
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

    @property
    def side_inputs(self) -> frozenset[str]:
        return frozenset((NAME,))

    def divisors(self) -> tuple[Divisor, ...]:
        return ()

    def cost(self, embed: int) -> Cost:
        narrow = Activation("whole", self.width, 1, kept=True, products=1, elementwise=1)
        return Cost(2 * embed * self.width, (narrow, narrow, Activation("embed", embed, 1, kept=True, elementwise=1)))
