"""A layer computed by chunks of rows.

What later tokens need of each token (keys and values) is computed for whole rows first. All else a layer computes of a
token (its query, what it attends to, the feed-forward network) exists for one chunk at a time, forward and backward. A
long row then costs its residual stream, that stream's gradient, and keys and values with theirs, whatever the number of
query heads. A recurrence goes from chunk to chunk with its state: a row costs the states between the chunks. A mixer
that does neither takes whole rows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.block import Carried, Context, Hidden, Mixer, Output, RowParams, SharedMemory, Sums
from meshtune.model.cache import LayerCache, RowState, empty
from meshtune.model.chunks import over_chunks, over_chunks_with_state
from meshtune.model.inputs import Rows
from meshtune.model.layer import LayerSpec, layer
from meshtune.model.linear import fold, site_key
from meshtune.model.side import SHARED, of_tokens


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
