"""All layers in order: each stack is scanned over groups of its pattern, so compile time does not grow with depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.row_order import ORDER
from meshtune.model.attention import ROTATED
from meshtune.model.block import Context, Hidden, Measured, Sums, by_groups, for_all, with_stored
from meshtune.model.cache import Cache, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.gather import GATHERED, gather_layer_params, is_offloaded
from meshtune.model.inputs import Rows
from meshtune.model.layer import LayerSpec, layer, layer_by_chunks
from meshtune.model.linear import NARROW, PRODUCT, fold
from meshtune.model.router import CHOICE
from meshtune.model.spec import ModelSpec

RESIDUAL = "residual"  # the stream that enters a layer

# The results of matrix products (with LoRA the sum, not its parts) and of attention, and which experts compute a token.
SAVED = (PRODUCT, NARROW, ROTATED, OUTPUT, LOG_SUM_EXP, CHOICE, ORDER)


def rematerialised(layer: Callable[..., Any], compute: Compute, nodes: Tree) -> Callable[..., Any]:
    """`layer`, which keeps what compute.remat says; `nodes` are the parameters of the layers of a scan's body.

    Full saves only the residual stream between layers; selective also what `SAVED` names, each needed one once.

    None leaves it to JAX, which keeps whatever any derivative reads: between two products several arrays as wide as
    either. Computing those again from the products costs less than storing and loading them. Weights that are fetched
    for a layer, from other devices or from the host, are fetched again in the backward pass.
    """
    policies = jax.checkpoint_policies
    if compute.remat == "none":
        if compute.layout is None and not any(is_offloaded(leaf) for leaf in jax.tree.leaves(nodes)):
            return layer
        policy = policies.save_anything_except_these_names(GATHERED)
    elif RESIDUAL in compute.offload:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=SAVED if compute.remat == "selective" else (),
            names_which_can_be_offloaded=(RESIDUAL,),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.nothing_saveable if compute.remat == "full" else policies.save_only_these_names(*SAVED)
    # A barrier makes a layer wait for its cotangent: those of one body would otherwise all be computed again at once.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not compute.scan or len(nodes) > 1)


def no_sums(spec: ModelSpec) -> dict[str, Array]:
    """Zeros for all sums of a model's layers."""
    shapes = {name: shape for block in spec.blocks for name, shape in block.sums().items()}
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def add_sums(total: Sums, sums: Sums) -> dict[str, Array]:
    """`total` with the sums of one more layer."""
    return {name: value + sums[name] if name in sums else value for name, value in total.items()}


class LayersResult(NamedTuple):
    """What the layers add to the mean loss (None: nothing), and their metrics, each a total and its weight."""

    loss: Float[Array, ""] | None
    metrics: Mapping[str, tuple[Array, Array]]


def layers_result(spec: ModelSpec, sums: Sums) -> LayersResult:
    """The loss and the metrics of the layers, from the sums of a whole batch."""
    measured = [block for block in spec.blocks if isinstance(block, Measured)]
    metrics = {name: metric for block in measured for name, metric in block.metrics(sums).items()}
    return LayersResult(layers_loss(spec, sums), jax.lax.stop_gradient(metrics))


def layers_loss(spec: ModelSpec, sums: Sums) -> Array | None:
    """What the layers add to the mean loss, from the sums of a whole batch; None where they add nothing."""
    losses = [loss for block in spec.blocks if (loss := block.loss(sums)) is not None]
    return sum(losses[1:], losses[0]) if losses else None


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
