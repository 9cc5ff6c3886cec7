"""All layers in order: each stack is scanned over groups of its pattern, so compile time does not grow with depth."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.block import Context, Hidden, Sums
from meshtune.model.cache import Cache, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.gather import gather_layer_params
from meshtune.model.inputs import Rows
from meshtune.model.layer import LayerSpec, layer
from meshtune.model.layer_chunks import layer_by_chunks
from meshtune.model.linear import fold
from meshtune.model.remat import RESIDUAL, rematerialised
from meshtune.model.side import by_groups, for_all, with_stored
from meshtune.model.spec import ModelSpec
from meshtune.model.sums import add_sums, no_sums

# What runs through the layers: the residual stream, the caches by key, and the sums so far.
Stream = tuple[Hidden, dict[str, Tree], Sums]


def through_layers(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    x: Hidden,
    rows: Rows,
    side: Tree,
    rng: Array | None,
    cache: Cache | None,
) -> Stream:
    """(x after all layers, their caches, their sums).

    A memory that a layer stores is there for all layers behind it; each stack closes over those of earlier stacks.
    A node of params["layers"] holds stacked arrays, or is a tuple of each layer's node, and its stack is then unrolled.
    """
    first, shared = 0, params.get("shared")
    apply = layer if compute.attention_chunk is None else layer_by_chunks
    stream = x, {} if cache is None else cache.layers, no_sums(spec)

    def of_layer(stream: Stream, node: Tree, row: Array, number: Array, given: Tree, key: str, kind: LayerSpec) -> Any:
        (x, caches), sums = checkpoint_name(stream[:2], RESIDUAL), stream[2]
        context = Context(compute, rows, given, number, fold(rng, number))
        before = None if cache is None else LayerCache(caches[key], row, cache.lengths)
        x, after, new, left = apply(x, gather_layer_params(node, spec, key, compute, shared), kind, context, before)
        return (x, caches if after is None else caches | {key: after.arrays}, add_sums(sums, new)), dict(left)

    for s, stack in enumerate(spec.stacks):
        nodes = {f"{s}.{p}": params["layers"][f"{s}.{p}"] for p in range(len(stack.pattern))}
        by_layer = by_groups(side, first, stack.repeats, len(stack.pattern))
        of_stack = first, s, stack.pattern, for_all(side)

        def group(stream: Stream, at: tuple[Tree, Array, Tree], of_stack: Any = of_stack) -> Any:
            (first, s, pattern, side), (nodes, row, by_place) = of_stack, at
            stored: dict[str, Tree] = {}
            for p, kind in enumerate(pattern):
                given = with_stored(side, stored) | {name: array[p] for name, array in by_place.items()}
                step = rematerialised(functools.partial(of_layer, key=f"{s}.{p}", kind=kind), compute, nodes)
                stream, left = step(stream, nodes[f"{s}.{p}"], row, first + row * len(pattern) + p, given)
                stored |= left
            return stream, stored

        if compute.scan and stack.repeats > 1 and not isinstance(nodes[f"{s}.0"], tuple):
            stream, _ = lax.scan(group, stream, (nodes, jnp.arange(stack.repeats), by_layer))
        else:
            for row in range(stack.repeats):
                node = {key: _of_layer(node, row) for key, node in nodes.items()}
                stream, stored = group(stream, (node, jnp.int32(row), _of_layer(by_layer, row)))
                side = with_stored(side, stored)
        first += stack.layers
    return stream


def _of_layer(nodes: Tree | tuple[Tree, ...], row: int) -> Tree:
    """The node of layer `row` of a stack."""
    return nodes[row] if isinstance(nodes, tuple) else jax.tree.map(lambda leaf: leaf[row], nodes)
