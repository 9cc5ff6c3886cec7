"""A layer computed by chunks of rows.

What later tokens need of each token (keys and values) is computed for whole rows first. All else a layer computes of a
token (its query, what it attends to, the feed-forward network) exists for one chunk at a time, forward and backward;
where the mixer takes whole rows (a recurrence), the feed-forward network alone. A long row then costs its residual
stream, that stream's gradient, and keys and values with theirs, whatever the number of query heads.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.block import Context, Hidden, Mixer, Output, RowParams, SharedMemory, Sums
from meshtune.model.cache import LayerCache
from meshtune.model.chunks import over_chunks
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
    reads = mixer.row_params()
    return layer(x, node, spec, context) if reads is None else _by_chunks(x, node, spec, mixer, reads, context)


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
