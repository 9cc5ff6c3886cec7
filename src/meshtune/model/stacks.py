"""All layers of a model in order: each stack is scanned over groups of its pattern, so that compile time does not grow
with depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT
from meshtune.model.attention import ROTATED
from meshtune.model.block import Context, Hidden, Sums
from meshtune.model.cache import Cache, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.gather import GATHERED, gather_layer_params, is_offloaded
from meshtune.model.inputs import Rows
from meshtune.model.layer import fold, layer
from meshtune.model.linear import NARROW, PRODUCT
from meshtune.model.reverse import RESIDUAL, Layer
from meshtune.model.side import by_groups, for_all, of_layer, with_stored
from meshtune.model.spec import ModelSpec

# The results of matrix products (with LoRA the sum, not its parts) and of attention.
SAVED = (PRODUCT, NARROW, ROTATED, OUTPUT, LOG_SUM_EXP)


class Stream(NamedTuple):
    """What runs through the layers: the residual stream, the caches by key, and the sums so far."""

    x: Hidden
    caches: dict[str, Tree]
    sums: Sums


def no_sums(spec: ModelSpec) -> dict[str, Array]:
    """Zeros for all sums of a model's layers."""
    shapes: Mapping[str, tuple[int, ...]] = {
        name: shape for kind in spec.layer_kinds for name, shape in kind.sums().items()
    }
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def add_sums(total: Sums, sums: Sums) -> dict[str, Array]:
    """`total` with the sums of one more layer."""
    return {name: value + sums[name] if name in sums else value for name, value in total.items()}


def through_layers(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    x: Hidden,
    rows: Rows,
    side: Tree,
    rng: Array | None,
    cache: Cache | None,
) -> tuple[Hidden, dict[str, Tree], Sums]:
    """(x after all layers, their caches, their sums).

    A memory that a layer stores is there for all layers behind it; each stack closes over those of earlier stacks.
    """
    first, shared = 0, params.get("shared")
    stream = Stream(x, {} if cache is None else cache.layers, no_sums(spec))
    for s, stack in enumerate(spec.stacks):
        nodes = {f"{s}.{p}": params["layers"][f"{s}.{p}"] for p in range(len(stack.pattern))}

        by_layer = by_groups(side, first, stack.repeats, len(stack.pattern))

        def group(
            stream: Stream,
            at: tuple[Tree, Array, Tree],
            first: int = first,
            stack: Any = stack,
            s: int = s,
            side: Tree = for_all(side),
        ) -> Any:
            nodes, row, by_place = at
            x, caches, sums = stream
            stored: dict[str, Tree] = {}
            x, caches = jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL), (x, caches))
            for p, kind in enumerate(stack.pattern):
                key, number = f"{s}.{p}", first + row * len(stack.pattern) + p
                node = gather_layer_params(nodes[key], spec, key, compute, shared)
                given = with_stored(side, stored) | {name: array[p] for name, array in by_place.items()}
                context = Context(compute, rows, given, number, fold(rng, number))
                before = None if cache is None else LayerCache(caches[key], row, cache.lengths)
                x, after, new, left = layer(x, node, kind, context, before)
                stored |= left
                caches = caches if after is None else caches | {key: after.arrays}
                sums = add_sums(sums, new)
            return Stream(x, caches, sums), stored

        group = _rematerialised(group, compute, nodes)
        if compute.scan and stack.repeats > 1:
            stream, _ = lax.scan(group, stream, (nodes, jnp.arange(stack.repeats), by_layer))
        else:
            for row in range(stack.repeats):
                parts = jax.tree.map(lambda leaf, row=row: leaf[row], (nodes, by_layer))
                stream, stored = group(stream, (parts[0], jnp.int32(row), parts[1]))
                side = with_stored(side, stored)
        first += stack.layers
    return stream.x, stream.caches, stream.sums


def single_layer(spec: ModelSpec, compute: Compute, stack: int) -> Layer:
    """The function of one layer of a stack, by its place in the pattern, for the layer-by-layer backward pass."""
    first = sum(earlier.layers for earlier in spec.stacks[:stack])
    pattern = spec.stacks[stack].pattern

    def apply(x: Hidden, node: Tree, place: int, row: Array, rows: Rows, side: Tree) -> tuple[Hidden, Sums, Tree]:
        node = gather_layer_params(node, spec, f"{stack}.{place}", compute)
        number = first + row * len(pattern) + place
        output = layer(x, node, pattern[place], Context(compute, rows, of_layer(side, number), number))
        return output.y, add_sums(no_sums(spec), output.sums), dict(output.stored)

    return apply


def layer_functions(spec: ModelSpec, compute: Compute) -> Callable[[int], Layer]:
    """`single_layer` by the number of the stack."""
    return functools.partial(single_layer, spec, compute)


def _rematerialised(group: Callable[..., Any], compute: Compute, nodes: Tree) -> Callable[..., Any]:
    """Full saves only the residual stream between groups; selective also what `SAVED` names, each needed one once.

    None leaves it to JAX, which keeps whatever any derivative reads: between two products several arrays as wide as
    either. Computing those again from the products costs less than storing and loading them. Weights that are fetched
    for a layer, from other devices or from the host, are fetched again in the backward pass.
    """
    policies = jax.checkpoint_policies
    if compute.remat == "none":
        if compute.layout is None and not any(is_offloaded(leaf) for leaf in jax.tree.leaves(nodes)):
            return group
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
    return jax.checkpoint(group, policy=policy, prevent_cse=not compute.scan)
