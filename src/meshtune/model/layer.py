"""One layer: a mixer and a feed-forward network around the residual stream. This body serves training, chunks of rows
(layer_chunks.py), the layer-by-layer backward pass, decoding over a cache and verifying."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import constrain
from meshtune.model.around import NOTHING, Surroundings
from meshtune.model.block import Block, Context, FeedForward, Hidden, Mixer, Output, SharedMemory, Sums
from meshtune.model.cache import MixerState
from meshtune.model.chunks import over_chunks
from meshtune.model.inputs import Rows
from meshtune.model.linear import fold, site_key
from meshtune.model.norm import NormSpec
from meshtune.model.side import of_tokens
from meshtune.model.streams import Streams

# Where norms stand: before each block, after it (and before the residual sum), both; or both blocks read the same
# normalised stream and are added to it together, with a norm for each of them or one for both.
Placement = Literal["pre", "post", "both", "parallel", "parallel_shared"]
STREAM = ("batch", "length", "embed")  # the logical axes of the residual stream


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: its mixer and feed-forward network (either may be absent), their norms, and what multiplies their
    results (`scale`); and what is `around` them.

    With `ffn_norm` False the feed-forward network is given the stream as it is, and normalises it itself.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    norm: NormSpec
    placement: Placement = "pre"
    scale: float | None = None
    ffn_norm: bool = True
    around: Surroundings = NOTHING

    def __post_init__(self):
        whole = self.mixer is not None and self.ffn is not None and not self.placement.startswith("parallel")
        assert whole or self.around == NOTHING, "what is around blocks follows a mixer, and then a network"

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (*(block for block in (self.mixer, self.ffn) if block is not None), *self.around.blocks)

    @property
    def stores(self) -> str | None:
        """The name of the memory that the mixer stores for later layers."""
        return self.mixer.stores if isinstance(self.mixer, SharedMemory) else None

    def params(self, embed: int) -> Tree:
        """ArraySpecs of one layer: {attn_norm, attn, mlp_norm, mlp}, and post-norms as {attn_post_norm, ..}."""
        tree: Tree = {}
        for block in (block for block in (self.mixer, self.ffn) if block is not None):
            shared = self.placement == "parallel_shared" and block is not self.blocks[0]
            if self.input_norm(block) is not None and not shared:
                tree[f"{block.name}_norm"] = self.norm.params(embed, "embed")
            tree[block.name] = block.params(embed)
            if self.has_post_norms:
                tree[f"{block.name}_post_norm"] = self.norm.params(embed, "embed")
        tree |= self.around.params(embed)
        return {name: node for name, node in tree.items() if node}

    @property
    def has_post_norms(self) -> bool:
        """Whether the blocks' results are normalised before they are added to the stream."""
        return self.placement in ("post", "both")

    def normalised(self, x: Hidden, node: Tree, block: Block) -> Hidden:
        """A block's input, from the stream x."""
        norm = self.input_norm(block)
        return x if norm is None else self.norm(x, node.get(norm, {}))

    def input_norm(self, block: Block) -> str | None:
        """The key of the norm that a block's input goes through, None if there is none."""
        if self.placement == "post" or (block is self.ffn and not self.ffn_norm):
            return None
        return f"{(self.blocks[0] if self.placement == 'parallel_shared' else block).name}_norm"


def layer(x: Hidden | Streams, node: Tree, spec: LayerSpec, context: Context, cache: MixerState = None) -> Output:
    """The hidden state after a single layer, whose unstacked parameters are `node`."""
    x, streams = spec.around.enter(x, node)
    total, sums, stored = x, {}, {}
    if spec.mixer is not None:
        keyed = dataclasses.replace(context, key=site_key(context.key, spec.mixer.name))
        y, cache, sums, stored = _branch(x, node, spec, spec.mixer, keyed, cache)
        total = spec.around.beside_mixer(x + y, spec.normalised(x, node, spec.mixer), node, context)
    total = constrain(total, context.compute.layout, *STREAM)
    if spec.ffn is None:
        return Output(total, cache, sums, stored)
    y, ffn_sums = _add_ffn((x, total, streams), node, spec, spec.ffn, context)
    return Output(y, cache, {**sums, **ffn_sums}, stored)


def _branch(x: Hidden, node: Tree, spec: LayerSpec, block: Block, context: Context, cache: MixerState) -> Output:
    """What a block adds to the stream x."""
    y, cache, sums, stored = block.apply(spec.normalised(x, node, block), node[block.name], context, cast(Any, cache))
    if spec.has_post_norms:
        y = spec.norm(y, node.get(f"{block.name}_post_norm", {}))
    if spec.scale is not None:  # in float32: bfloat16 would round 0.22 by a thousandth
        y = (y.astype(jnp.float32) * spec.scale).astype(y.dtype)
    return Output(y, cache, sums, stored)


def _add_ffn(
    stream: tuple[Hidden, Hidden, Streams | None], node: Tree, spec: LayerSpec, ffn: FeedForward, context: Context
) -> tuple[Hidden | Streams, Sums]:
    """The stream with the feed-forward network's result, computed by chunks of compute.mlp_chunk tokens.

    `stream` is the one that enters the layer, that with the mixer's result, and all of several.
    """
    x, total, streams = stream
    compute, parallel = context.compute, spec.placement.startswith("parallel")
    params = {name: leaf for name, leaf in node.items() if spec.mixer is None or name != spec.mixer.name}

    def add(shared: Any, x: Hidden, beside: Tree, rows: Rows, number: Array | None) -> tuple[Hidden, Sums]:
        node, index, key = shared

        def context_of(block: FeedForward) -> Context:
            return Context(compute, rows, beside["side"], index, fold(site_key(key, block.name), number))

        fed = _branch(x, node, spec, ffn, context_of(ffn), None)
        y = spec.around.leave(beside.get("total", x) + fed.y, beside.get("streams"), node, context_of)
        return constrain(y, compute.layout, *STREAM[:2], *("whole",) * (y.ndim - 3), "embed"), fed.sums

    return over_chunks(
        add,
        (params, context.index, context.key),
        x if parallel else total,
        {"side": of_tokens(context.side)}
        | ({"total": total} if parallel else {})
        | ({} if streams is None else {"streams": streams}),
        context.rows,
        chunk=compute.mlp_chunk,
        ranks=compute.row_parts,
    )
