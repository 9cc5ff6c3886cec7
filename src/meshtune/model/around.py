"""What some families have around the blocks of a layer: a low-rank residual beside the mixer, several residual streams,
per-layer embeddings and a scalar behind the feed-forward network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.block import Block, Context, FeedForward, Hidden
from meshtune.model.laurel import LaurelSpec
from meshtune.model.linear import site_key
from meshtune.model.streams import AltUpSpec, Streams

SCALAR = "scalar"  # the key of the number that multiplies the stream


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Around the blocks of a layer; all of it may be absent.

    `laurel`, of the mixer's input, is added to the stream together with the mixer's result, and the sum divided by the
    root of two. `per_layer` is added to the stream behind the feed-forward network, from the stream as it is
    (model.per_layer). With `scalar` the stream that leaves the layer is multiplied by a number of the model that is not
    trained. With `streams` there are several streams, of which the blocks change one, and `per_layer` the others.
    """

    laurel: LaurelSpec | None = None
    streams: AltUpSpec | None = None
    per_layer: FeedForward | None = None
    scalar: bool = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in (self.laurel, self.per_layer) if block is not None)

    def params(self, embed: int) -> Tree:
        """ArraySpecs of one layer, by the names of the parts."""
        parts = (*self.blocks, *(() if self.streams is None else (self.streams,)))
        tree: Tree = {part.name: part.params(embed) for part in parts}
        if self.scalar:
            tree[SCALAR] = {"weight": ArraySpec((1,), "float32", ("whole",), "ones", role="buffer")}
        return tree

    def enter(self, x: Hidden | Streams, node: Tree) -> tuple[Hidden, Streams | None]:
        """(the stream that the blocks read, all of several), of what enters the layer."""
        if self.streams is None:
            return x, None
        predicted = self.streams.predict(x, node[self.streams.name])
        return self.streams.active_of(predicted), predicted

    def beside_mixer(self, total: Hidden, x: Hidden, node: Tree, context: Context) -> Hidden:
        """The stream with the mixer's result, `total`, and `laurel` of the mixer's input x."""
        if self.laurel is None:
            return total
        keyed = dataclasses.replace(context, key=site_key(context.key, self.laurel.name))
        beside = self.laurel.apply(x, node[self.laurel.name], keyed, None).y
        return ((total + beside).astype(jnp.float32) * 2**-0.5).astype(total.dtype)

    def leave(
        self, y: Hidden, predicted: Streams | None, node: Tree, context_of: Callable[[FeedForward], Context]
    ) -> Hidden | Streams:
        """What leaves the layer, from the stream behind the feed-forward network and what `enter` gave."""
        streams, active = self.streams, y
        if streams is not None:
            assert predicted is not None
            y = streams.correct(predicted, y, node[streams.name])
            active = streams.output(y, node[streams.name])
        if self.per_layer is not None:
            added = self.per_layer.apply(active, node[self.per_layer.name], context_of(self.per_layer), None).y
            y = y + added if streams is None else streams.with_added(y, added)
        return y * jax.lax.stop_gradient(node[SCALAR]["weight"]).astype(y.dtype) if self.scalar else y


NOTHING = Surroundings()
