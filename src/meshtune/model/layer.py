"""One layer: norms, blocks and the residual stream, for whole rows or by chunks of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, cast

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import constrain
from meshtune.model.block import (
    SHARED,
    STREAMS,
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
    without_memories,
)
from meshtune.model.cache import LayerCache, MixerState, RowState, empty
from meshtune.model.chunks import over_chunks, over_chunks_with_state
from meshtune.model.inputs import SequenceInfo
from meshtune.model.linear import fold, site_key
from meshtune.model.norm import NormSpec

if TYPE_CHECKING:
    from meshtune.model.layer_extras import LayerExtras, Streams

# Where norms stand: before each block, after it (and before the residual sum), both; or both blocks read the same
# normalised stream and are added to it together, with a norm for each of them or one for both.
Placement = Literal["pre", "post", "both", "parallel", "parallel_shared"]
PARALLEL = ("parallel", "parallel_shared")  # both blocks read the stream that enters the layer
STREAM = ("batch", "length", "embed")  # the logical axes of the residual stream


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: its mixer and feed-forward network (either may be absent), their norms, and a number by which their
    results are multiplied (`scale`). With `layer_scale` they are also multiplied by a trained vector each
    (https://arxiv.org/abs/2103.17239). The side input named `adds`, where there is one, is added to what leaves the
    layer; a `tapped` layer is a stack by itself, so that what leaves it can be read.

    With `ffn_norm` False the feed-forward network reads the stream itself, and normalises it. `extras` are the parts
    that Gemma 3n and Gemma 4 add around the two blocks.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    norm: NormSpec
    placement: Placement = "pre"
    scale: float | None = None
    ffn_norm: bool = True
    extras: LayerExtras | None = None
    layer_scale: bool = False
    adds: str | None = None
    tapped: bool = False

    def __post_init__(self):
        sequential = self.mixer is not None and self.ffn is not None and self.placement not in PARALLEL
        assert sequential or self.extras is None, "extras follow a mixer, and then a network"

    @property
    def blocks(self) -> tuple[Block, ...]:
        blocks = (self.mixer, self.ffn, *(() if self.extras is None else self.extras.blocks))
        return tuple(block for block in blocks if block is not None)

    @property
    def stores(self) -> str | None:
        """The name of the memory that the mixer stores for later layers."""
        return self.mixer.stores if isinstance(self.mixer, SharedMemory) else None

    def params(self, embed: int) -> Tree:
        """ArraySpecs of one layer: {attn_norm, attn, mlp_norm, mlp}, and post-norms as {attn_post_norm, ..}."""
        tree: Tree = {}
        for block in (block for block in (self.mixer, self.ffn) if block is not None):
            if self.input_norm(block) == f"{block.name}_norm":
                tree[f"{block.name}_norm"] = self.norm.params(embed, "embed")
            tree[block.name] = block.params(embed)
            if self.placement in ("post", "both"):
                tree[f"{block.name}_post_norm"] = self.norm.params(embed, "embed")
            if self.layer_scale:
                vector = ArraySpec((embed,), "float32", ("embed",), "ones", role="vector")
                tree[f"{block.name}_scale"] = {"weight": vector}
        if self.extras is not None:
            tree |= self.extras.params(embed)
        return {name: node for name, node in tree.items() if node}

    def input_norm(self, block: Block) -> str | None:
        """The key of the norm that a block's input goes through, None if there is none."""
        if self.placement == "post" or (block is self.ffn and not self.ffn_norm):
            return None
        return f"{(self.blocks[0] if self.placement == 'parallel_shared' else block).name}_norm"

    def block_input(self, x: Hidden, node: Tree, block: Block) -> Hidden:
        """The residual stream as a block reads it."""
        norm = self.input_norm(block)
        return x if norm is None else self.norm(x, node.get(norm, {}))


def layer(x: Hidden | Streams, node: Tree, spec: LayerSpec, context: Context, cache: MixerState = None) -> Output:
    """One layer: adds the mixer's result to the residual stream x, then the feed-forward network's.

    `node` are its parameters, without the axis of stacked layers.
    """
    extras, compute = spec.extras, context.compute
    x, streams = (x, None) if extras is None else extras.enter(x, node)
    h, sums, stored = x, {}, {}
    if spec.mixer is not None:
        y, cache, sums, stored = _apply(spec, spec.mixer, x, node, context, cache)
        h = x + y
        if extras is not None:
            h = extras.add_laurel(h, spec.block_input(x, node, spec.mixer), node, context)
    if compute.layout is not None:
        h = constrain(h, compute.layout, *STREAM)
    if spec.ffn is None:
        return Output(h, cache, sums, stored)
    add_ffn = _add_ffn if compute.mlp_chunk is None else _add_ffn_by_chunks
    y, ffn_sums = add_ffn(spec, spec.ffn, x, h, streams, node, context)
    if spec.adds in context.side:
        y = y + context.side[spec.adds].astype(y.dtype)
    return Output(y, cache, {**sums, **ffn_sums}, stored)


def _apply(spec: LayerSpec, block: Block, x: Hidden, node: Tree, context: Context, cache: MixerState) -> Output:
    """A block's result from the residual stream x, with its norms."""
    x, context = spec.block_input(x, node, block), context.for_block(block.name)
    y, cache, sums, stored = block.apply(x, node[block.name], context, cast(Any, cache))
    if spec.placement in ("post", "both"):
        y = spec.norm(y, node.get(f"{block.name}_post_norm", {}))
    if spec.scale is not None:  # in float32: bfloat16 would round 0.22 by a thousandth
        y = (y.astype(jnp.float32) * spec.scale).astype(y.dtype)
    if spec.layer_scale:
        y = y * node[f"{block.name}_scale"]["weight"].astype(y.dtype)
    return Output(y, cache, sums, stored)


def _add_ffn(
    spec: LayerSpec, ffn: FeedForward, x: Hidden, h: Hidden, streams: Streams | None, node: Tree, context: Context
) -> tuple[Hidden | Streams, Sums]:
    """Adds the feed-forward network's result to the stream h; x is the stream that entered the layer."""
    result = _apply(spec, ffn, x if spec.placement in PARALLEL else h, node, context, None)
    y, layout = h + result.y, context.compute.layout
    if spec.extras is not None:
        y = spec.extras.leave(y, streams, node, context)
    return (y if layout is None else constrain(y, layout, *_stream_axes(y))), result.sums


def _add_ffn_by_chunks(
    spec: LayerSpec, ffn: FeedForward, x: Hidden, h: Hidden, streams: Streams | None, node: Tree, context: Context
) -> tuple[Hidden | Streams, Sums]:
    """`_add_ffn` by chunks of compute.mlp_chunk tokens."""
    compute = context.compute
    params = {name: leaf for name, leaf in node.items() if spec.mixer is None or name != spec.mixer.name}

    def add(shared: Any, x: Hidden, beside: Tree, rows: SequenceInfo, number: Array | None) -> tuple[Hidden, Sums]:
        node, index, key = shared
        context = Context(compute, rows, beside["side"], index, key, chunk=number)
        return _add_ffn(spec, ffn, x, beside.get("h", x), beside.get("streams"), node, context)

    beside = {"side": without_memories(context.side)} | ({"h": h} if spec.placement in PARALLEL else {})
    beside |= {} if streams is None else {"streams": streams}
    shared = (params, context.index, context.key)
    x, size = x if spec.placement in PARALLEL else h, {"chunk": compute.mlp_chunk, "ranks": compute.row_parts}
    return over_chunks(add, shared, x, beside, context.sequences, **size)


def _stream_axes(x: Hidden | Streams) -> tuple[str, ...]:
    """The logical axes of the residual stream, or of several."""
    return (*STREAM[:2], *("whole",) * (x.ndim - 3), "embed")


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
    compute, rows = context.compute, context.sequences
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
    shared, beside = (node, context.index, context.key), {"side": without_memories(context.side)}
    y, sums = over_chunks_with_state(output_of, shared, begin, x, beside, (rows, earlier), chunk=chunk)
    return Output(y, None, sums)


def _by_chunks(x: Hidden, node: Tree, spec: LayerSpec, mixer: Mixer, reads: RowParams, context: Context) -> Output:
    """From the memory of whole rows, which the mixer computes or an earlier layer has stored."""
    compute, beside = context.compute, {"side": without_memories(context.side)}
    assert reads.memory | reads.chunk == set(node[mixer.name]), f"{mixer.name}: parameters that no pass reads"
    size = {"chunk": compute.attention_chunk, "ranks": compute.row_parts}

    def part(names: frozenset[str]) -> Tree:
        return {mixer.name: {name: leaf for name, leaf in node[mixer.name].items() if name in names}}

    def memory_of(shared: Any, x: Hidden, beside: Tree, rows: SequenceInfo, number: Array | None) -> tuple[Tree, Sums]:
        """The keys and values, or the like, of a chunk's tokens."""
        node, index, key = shared
        context = Context(compute, rows, beside["side"], index, fold(key, number))
        x = x if spec.extras is None else spec.extras.enter(x, node)[0]
        return mixer.memory(spec.block_input(x, node, mixer), node[mixer.name], context), {}

    def output_of(
        shared: Any, x: Hidden, beside: Tree, rows: SequenceInfo, number: Array | None
    ) -> tuple[Hidden, Sums]:
        """A chunk of the stream after the layer, from the memory of whole rows."""
        node, index, key, memory, all_rows = shared
        context = Context(compute, rows, beside["side"], index, fold(key, number), (memory, all_rows))
        output = layer(x, node, spec, context)
        return output.y, output.sums

    before = {name: node[name] for name in (spec.input_norm(mixer), STREAMS) if name in node}
    params = before | part(reads.memory)
    shared = (params, context.index, site_key(context.key, mixer.name))
    if isinstance(mixer, SharedMemory) and mixer.reads is not None:
        memory = context.side[SHARED][mixer.reads]
    else:
        memory, _ = over_chunks(memory_of, shared, x, beside, context.sequences, **size)
    shared = (node | part(reads.chunk), context.index, context.key, memory, context.sequences)
    y, sums = over_chunks(output_of, shared, x, beside, context.sequences, **size)
    return Output(y, None, sums, {} if spec.stores is None else {spec.stores: memory})
