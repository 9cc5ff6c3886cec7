"""One layer: norms, blocks and the residual stream, for whole rows or by chunks of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import constrain
from meshtune.model.block import (
    SHARED,
    Block,
    Carried,
    Context,
    FeedForward,
    Hidden,
    Mixer,
    Output,
    RowParams,
    SharedMemory,
    Sums,
    of_tokens,
)
from meshtune.model.cache import LayerCache, MixerState, RowState, empty
from meshtune.model.chunks import over_chunks, over_chunks_with_state
from meshtune.model.inputs import Rows
from meshtune.model.layer_extras import NOTHING, Streams, Surroundings
from meshtune.model.linear import fold, site_key
from meshtune.model.norm import NormSpec

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


def layer_by_chunks(
    x: Hidden, node: Tree, spec: LayerSpec, context: Context, cache: LayerCache | None = None
) -> Output:
    """`layer`, by chunks of compute.attention_chunk tokens of a row where its mixer can be computed by chunks."""
    mixer, chunk = spec.mixer, context.compute.attention_chunk
    if mixer is None or cache is not None or chunk is None or chunk >= x.shape[1]:
        return layer(x, node, spec, context, cache)
    reads, carried = mixer.row_params(), mixer.carried(x.shape[0], str(x.dtype))
    if reads is not None:
        return _by_chunks(x, node, spec, mixer, reads, context)
    return layer(x, node, spec, context) if carried is None else _with_state(x, node, spec, carried, context, chunk)


def _with_state(x: Hidden, node: Tree, spec: LayerSpec, carried: Carried, context: Context, chunk: int) -> Output:
    """From chunk to chunk with the mixer's state, which is zero before the rows."""
    compute, rows = context.compute, context.rows
    begin = empty(carried.arrays, x.shape[0], compute.layout).layers

    def output_of(
        shared: Any, state: Tree, x: Hidden, beside: Tree, tokens: Any, number: Array
    ) -> tuple[Hidden, Sums, Tree]:
        (node, index, key), (rows, earlier) = shared, tokens
        context = Context(compute, rows, beside["side"], index, fold(key, number))
        output = layer(x, node, spec, context, RowState(state, earlier[:, 0]))
        assert isinstance(output.cache, RowState)
        return output.y, output.sums, output.cache.arrays

    padded = jnp.pad(rows.segment_ids, ((0, 0), (carried.tokens, 0)), constant_values=-1)
    earlier = jnp.stack([padded[:, n : n + x.shape[1]] for n in range(carried.tokens)], axis=-1)
    shared, beside = (node, context.index, context.key), {"side": of_tokens(context.side)}
    y, sums = over_chunks_with_state(output_of, shared, begin, x, beside, (rows, earlier), chunk=chunk)
    return Output(y, None, sums)


def _by_chunks(x: Hidden, node: Tree, spec: LayerSpec, mixer: Mixer, reads: RowParams, context: Context) -> Output:
    """From the memory of whole rows, which the mixer computes or an earlier layer has stored."""
    compute, beside = context.compute, {"side": of_tokens(context.side)}
    assert reads.memory | reads.chunk == set(node[mixer.name]), f"{mixer.name}: parameters that no pass reads"
    size = {"chunk": compute.attention_chunk, "ranks": compute.row_parts}

    def part(names: frozenset[str]) -> Tree:
        return {mixer.name: {name: leaf for name, leaf in node[mixer.name].items() if name in names}}

    def memory_of(shared: Any, x: Hidden, beside: Tree, rows: Rows, number: Array | None) -> tuple[Tree, Sums]:
        """What later tokens need of the tokens of a chunk."""
        node, index, key = shared
        context = Context(compute, rows, beside["side"], index, fold(key, number))
        x, _ = spec.around.enter(x, node)
        return mixer.memory(spec.normalised(x, node, mixer), node[mixer.name], context), {}

    def output_of(shared: Any, x: Hidden, beside: Tree, rows: Rows, number: Array | None) -> tuple[Hidden, Sums]:
        """A chunk of the stream after the layer, from the memory of whole rows."""
        node, index, key, memory, all_rows = shared
        context = Context(compute, rows, beside["side"], index, fold(key, number), (memory, all_rows))
        output = layer(x, node, spec, context)
        return output.y, output.sums

    streams = () if spec.around.streams is None else (spec.around.streams.name,)
    before = {name: node[name] for name in (spec.input_norm(mixer), *streams) if name in node}
    params = before | part(reads.memory)
    shared = (params, context.index, site_key(context.key, mixer.name))
    if isinstance(mixer, SharedMemory) and mixer.reads is not None:
        memory = context.side[SHARED][mixer.reads]
    else:
        memory, _ = over_chunks(memory_of, shared, x, beside, context.rows, **size)
    shared = (node | part(reads.chunk), context.index, context.key, memory, context.rows)
    y, sums = over_chunks(output_of, shared, x, beside, context.rows, **size)
    return Output(y, None, sums, {} if spec.stores is None else {spec.stores: memory})
