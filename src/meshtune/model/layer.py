"""One layer: a mixer and a feed-forward network around the residual stream. This body serves training, chunks of rows,
the layer-by-layer backward pass, decoding over a cache and verifying.

With chunks, what later tokens need of each token (keys and values) is computed for whole rows first. All else a layer
computes of a token (its query, what it attends to, the feed-forward network) exists for one chunk at a time, forward
and backward; where the mixer takes whole rows (a recurrence), the feed-forward network alone. A long row then costs its
residual stream, that stream's gradient, and keys and values with theirs, whatever the number of query heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout, constrain
from meshtune.model.block import Block, Context, FeedForward, Hidden, Mixer, Output, SharedMemory, Sums
from meshtune.model.cache import LayerCache
from meshtune.model.chunks import over_chunks
from meshtune.model.compute import Compute
from meshtune.model.inputs import Rows
from meshtune.model.linear import site_key
from meshtune.model.norm import NormSpec
from meshtune.model.side import SHARED, of_tokens

# Where norms stand: before each block, after it (and before the residual sum), both; or both blocks read the same
# normalised stream and are added to it together, with a norm for each of them or one for both.
Placement = Literal["pre", "post", "both", "parallel", "parallel_shared"]
SCALAR = "scalar"  # the key of the number that multiplies the stream


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: its mixer and feed-forward network (either may be absent), their norms, and what multiplies their
    results (`scale`).

    `per_layer` is added to the stream behind them, from the stream as it is (model.per_layer). With `scalar` the stream
    that leaves the layer is multiplied by a number of the model that is not trained. With `ffn_norm` False the
    feed-forward network is given the stream as it is, and normalises it itself.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    norm: NormSpec
    placement: Placement = "pre"
    scale: float | None = None
    per_layer: FeedForward | None = None
    scalar: bool = False
    ffn_norm: bool = True

    def __post_init__(self):
        assert self.ffn is not None or not (self.per_layer or self.scalar), "they follow a feed-forward network"

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in (self.mixer, self.ffn, self.per_layer) if block is not None)

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
        if self.per_layer is not None:
            tree[self.per_layer.name] = self.per_layer.params(embed)
        if self.scalar:
            tree[SCALAR] = {"weight": ArraySpec((1,), "float32", ("whole",), "ones", role="buffer")}
        return {name: node for name, node in tree.items() if node}

    @property
    def has_post_norms(self) -> bool:
        """Whether the blocks' results are normalised before they are added to the stream."""
        return self.placement in ("post", "both")

    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the sums that the layer returns."""
        return {name: shape for block in self.blocks for name, shape in block.sums().items()}

    def input_norm(self, block: Block) -> str | None:
        """The key of the norm that a block's input goes through, None if there is none."""
        if self.placement == "post" or (block is self.ffn and not self.ffn_norm):
            return None
        return f"{(self.blocks[0] if self.placement == 'parallel_shared' else block).name}_norm"

    def nodes(self, block: Block) -> set[str]:
        """The keys of a layer's parameters that a block's part of it may read; a norm without parameters has none."""
        keys = {block.name, self.input_norm(block)}
        if self.has_post_norms:
            keys.add(f"{block.name}_post_norm")
        return {key for key in keys if key is not None}


def layer(x: Hidden, node: Tree, spec: LayerSpec, context: Context, cache: LayerCache | None = None) -> Output:
    """The hidden state after a single layer, whose unstacked parameters are `node`."""
    mixer, chunk = spec.mixer, context.compute.attention_chunk
    if mixer is None:
        return _with_ffn(x, x, node, spec, context, cache, {})
    if cache is None and chunk is not None and chunk < x.shape[1] and mixer.row_params() is not None:
        return _by_chunks(x, node, spec, mixer, context)
    mixed = _branch(x, node, spec, mixer, _keyed(context, mixer.name), cache)
    output = _with_ffn(x, x + mixed.y, node, spec, context, mixed.cache, mixed.sums)
    return output._replace(stored=mixed.stored)


def laid_out(x: Hidden, layout: Layout | None) -> Hidden:
    """The residual stream, laid out over the mesh."""
    return constrain(x, layout, "batch", "length", "embed")


def fold(rng: Array | None, number: Array | int | None) -> Array | None:
    """The source of dropout of the layer or chunk with this number."""
    return rng if rng is None or number is None else jax.random.fold_in(rng, number)


def _keyed(context: Context, site: str) -> Context:
    return dataclasses.replace(context, key=site_key(context.key, site))


def _branch(x: Hidden, node: Tree, spec: LayerSpec, block: Block, context: Context, cache: LayerCache | None) -> Output:
    """What a block adds to the stream x."""
    norm = spec.input_norm(block)
    h = x if norm is None else spec.norm(x, node.get(norm, {}))
    y, cache, sums, stored = block.apply(h, node[block.name], context, cache)
    if spec.has_post_norms:
        y = spec.norm(y, node.get(f"{block.name}_post_norm", {}))
    if spec.scale is not None:  # in float32: bfloat16 would round 0.22 by a thousandth
        y = (y.astype(jnp.float32) * spec.scale).astype(y.dtype)
    return Output(y, cache, sums, stored)


def _with_ffn(
    x: Hidden, total: Hidden, node: Tree, spec: LayerSpec, context: Context, cache: LayerCache | None, sums: Sums
) -> Output:
    """With the feed-forward network's result, computed by chunks of compute.mlp_chunk tokens.

    x is the stream that enters the layer, `total` the one with the mixer's result.
    """
    total = laid_out(total, context.compute.layout)
    if spec.ffn is None:
        return Output(total, cache, sums)
    parallel = spec.placement.startswith("parallel")
    behind = {SCALAR} | (set() if spec.per_layer is None else {spec.per_layer.name})
    params = {name: node[name] for name in spec.nodes(spec.ffn) | behind if name in node}
    feed = functools.partial(_feed, spec=spec, compute=context.compute)
    y, ffn_sums = over_chunks(
        feed,
        (params, context.index, context.key),
        x if parallel else total,
        {"side": of_tokens(context.side)} | ({"total": total} if parallel else {}),
        context.rows,
        chunk=context.compute.mlp_chunk,
        ranks=_ranks(context.compute),
    )
    return Output(y, cache, {**sums, **ffn_sums})


def _feed(
    shared: Any, x: Hidden, beside: Tree, rows: Rows, number: Array | None, *, spec: LayerSpec, compute: Compute
) -> tuple[Hidden, Sums]:
    node, index, key = shared
    assert spec.ffn is not None
    context = Context(compute, rows, beside["side"], index, key)

    def of(block: FeedForward) -> Context:
        return dataclasses.replace(context, key=fold(site_key(key, block.name), number))

    fed = _branch(x, node, spec, spec.ffn, of(spec.ffn), None)
    y = beside.get("total", x) + fed.y
    if spec.per_layer is not None:
        y = y + spec.per_layer.apply(y, node[spec.per_layer.name], of(spec.per_layer), None).y
    if spec.scalar:
        y = y * jax.lax.stop_gradient(node[SCALAR]["weight"]).astype(y.dtype)
    return laid_out(y, compute.layout), fed.sums


def _by_chunks(x: Hidden, node: Tree, spec: LayerSpec, mixer: Mixer, context: Context) -> Output:
    """From the memory of whole rows, which the mixer computes or an earlier layer has stored."""
    reads, compute = mixer.row_params(), context.compute
    assert reads is not None
    names = set(node[mixer.name])
    assert reads.memory | reads.chunk == names, f"{mixer.name}: parameters that no pass reads"
    size = {"chunk": compute.attention_chunk, "ranks": _ranks(compute)}
    options = {"spec": spec, "mixer": mixer, "compute": compute}

    def part(names: frozenset[str]) -> Tree:
        return {name: leaf for name, leaf in node[mixer.name].items() if name in names}

    norm = spec.input_norm(mixer)
    params = ({norm: node[norm]} if norm in node else {}) | {mixer.name: part(reads.memory)}
    shared = (params, context.index, site_key(context.key, mixer.name))
    beside = {"side": of_tokens(context.side)}
    if isinstance(mixer, SharedMemory) and mixer.reads is not None:
        memory = context.side[SHARED][mixer.reads]
    else:
        compute_memory = functools.partial(_chunk_memory, **options)
        memory, _ = over_chunks(compute_memory, shared, x, beside, context.rows, **size)
    shared = (node | {mixer.name: part(reads.chunk)}, context.index, context.key, memory, context.rows)
    compute_output = functools.partial(_chunk_output, **options)
    y, sums = over_chunks(compute_output, shared, x, beside, context.rows, **size)
    return Output(y, None, sums, {} if spec.stores is None else {spec.stores: memory})


def _chunk_memory(
    shared: Any,
    x: Hidden,
    beside: Tree,
    rows: Rows,
    number: Array | None,
    *,
    spec: LayerSpec,
    mixer: Mixer,
    compute: Compute,
) -> tuple[Tree, Sums]:
    """What later tokens need of the tokens of a chunk."""
    node, index, key = shared
    norm = spec.input_norm(mixer)
    h = x if norm is None else spec.norm(x, node.get(norm, {}))
    context = Context(compute, rows, beside["side"], index, fold(key, number))
    return mixer.memory(h, node[mixer.name], context), {}


def _chunk_output(
    shared: Any,
    x: Hidden,
    beside: Tree,
    rows: Rows,
    number: Array | None,
    *,
    spec: LayerSpec,
    mixer: Mixer,
    compute: Compute,
) -> tuple[Hidden, Sums]:
    """A chunk of the stream after the layer, from the memory of whole rows."""
    node, index, key, memory, all_rows = shared
    context = Context(compute, rows, beside["side"], index, fold(key, number), (memory, all_rows))
    mixed = _branch(x, node, spec, mixer, _keyed(context, mixer.name), None)
    output = _with_ffn(x, x + mixed.y, node, spec, dataclasses.replace(context, memory=None), None, mixed.sums)
    return output.y, output.sums


def _ranks(compute: Compute) -> int:
    """The number of devices that hold the parts of a row."""
    return 1 if compute.layout is None else compute.layout.size("cp")
