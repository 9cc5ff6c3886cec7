"""All layers in order: each stack is scanned over groups of its pattern, so compile time does not grow with depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from meshtune.arrays.tree import Leaves, Tree, flatten, unflatten
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.grouped import ORDER
from meshtune.model.attention import ROTATED
from meshtune.model.block import BY_LAYER, CHOICE, Adjusted, Context, Hidden, Measured, Sums, with_stored
from meshtune.model.cache import Cache, LayerCache
from meshtune.model.compute import Compute
from meshtune.model.gather import GATHERED, gather_layer_params, is_any_offloaded
from meshtune.model.inputs import SequenceInfo
from meshtune.model.layer import LayerSpec, layer, layer_by_chunks
from meshtune.model.linear import NARROW, PRODUCT, fold
from meshtune.model.spec import ModelSpec, Stack

RESIDUAL = "residual"  # the stream that enters a layer

# The results of matrix products (with LoRA the sum, not its parts) and of attention, and which experts compute a token.
SAVED = (PRODUCT, NARROW, ROTATED, OUTPUT, LOG_SUM_EXP, CHOICE, ORDER)


def rematerialise(layer: Callable[..., Any], compute: Compute, nodes: Tree) -> Callable[..., Any]:
    """Wraps a layer so that its backward pass keeps only what compute.remat says.

    "full" keeps the residual stream between layers; "selective" also what `SAVED` names. "none" leaves it to JAX, which
    keeps whatever any derivative reads: between two products several arrays as wide as either. Computing those again
    from the products costs less than storing and loading them. Weights that are fetched for a layer, from other devices
    or from the host, are fetched again in the backward pass. `nodes` are the parameters of the layers of a scan's body.
    """
    policies = jax.checkpoint_policies
    if compute.remat == "none":
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


def no_sums(stacks: Sequence[Stack]) -> dict[str, Array]:
    """Zeros for all sums of the layers of some stacks."""
    blocks = (block for stack in stacks for kind in stack.pattern for block in kind.blocks)
    shapes = {name: shape for block in blocks for name, shape in block.sums().items()}
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def add_sums(total: Sums, sums: Sums) -> dict[str, Array]:
    """Adds the sums of one more layer to `total`."""
    return {name: value + sums[name] if name in sums else value for name, value in total.items()}


class LayersResult(NamedTuple):
    """The layers' part of the mean loss (None: they have none), and their metrics, each a total and its weight."""

    loss: Float[Array, ""] | None
    metrics: Mapping[str, tuple[Array, Array]]


def layers_result(spec: ModelSpec, sums: Sums) -> LayersResult:
    """The loss and the metrics of the layers, from the sums of a whole batch."""
    measured = [block for block in spec.blocks if isinstance(block, Measured)]
    metrics = {name: metric for block in measured for name, metric in block.metrics(sums).items()}
    return LayersResult(layers_loss(spec, sums), jax.lax.stop_gradient(metrics))


def layers_loss(spec: ModelSpec, sums: Sums) -> Array | None:
    """The layers' part of the mean loss, from the sums of a whole batch; None where they have none."""
    losses = [loss for block in spec.blocks if (loss := block.loss(sums)) is not None]
    return sum(losses[1:], losses[0]) if losses else None


# The residual stream, the caches by key, and the sums so far.
Carry = tuple[Hidden, dict[str, Tree], Sums]


def through_layers(
    layers: Tree,
    stacks: Sequence[Stack],
    embed: int,
    compute: Compute,
    x: Hidden,
    rows: SequenceInfo,
    side: Tree,
    *,
    shared: PyTree = None,
    rng: Array | None = None,
    cache: Cache | None = None,
) -> Carry:
    """(x after all layers of `stacks`, their caches, their sums); x is [B, T, embed].

    A node of `layers` holds stacked arrays, or is a tuple of each layer's node: its stack is unrolled. `shared` are
    arrays that the adapters of all layers have in common, `rng` is the source of dropout. A memory that a layer stores
    is there for all later layers.
    """
    apply = layer if compute.attention_chunk is None else layer_by_chunks

    def run(key: str, kind: LayerSpec, carry: Carry, node: Tree, row: Array, index: Array, side: Tree) -> Any:
        """Row `row` of the layers at `key`, the model's layer number `index`: (carry, memories that it stores)."""
        (x, caches), sums = checkpoint_name(carry[:2], RESIDUAL), carry[2]
        context = Context(compute, rows, side, index, fold(rng, index))
        past = None if cache is None else LayerCache.of_layer(caches[key], row, cache.lengths)
        node = gather_layer_params(node, kind, embed, compute, shared)
        x, after, layer_sums, stored = apply(x, node, kind, context, past)
        return (x, caches if after is None else caches | {key: after.arrays}, add_sums(sums, layer_sums)), dict(stored)

    first, carry = 0, (x, {} if cache is None else cache.layers, no_sums(stacks))
    for number, stack in enumerate(stacks):
        keys = {f"{number}.{place}": kind for place, kind in enumerate(stack.pattern)}
        carry, stored = _run_stack(run, stack, keys, {key: layers[key] for key in keys}, first, carry, side, compute)
        side, first = with_stored(side, stored) if stored else side, first + stack.layers
    return carry


def _run_stack(
    run: Callable[..., Any],
    stack: Stack,
    kinds: dict[str, LayerSpec],
    nodes: Tree,
    first: int,
    carry: Carry,
    side: Tree,
    compute: Compute,
) -> tuple[Carry, Tree]:
    """(carry, memories that the layers store) after a stack, whose first layer is the model's number `first`."""
    width, by_layer = len(stack.pattern), {}
    if BY_LAYER in side:
        by_layer, side = _split_by_layer(side, stack, first)
    recompute = compute.remat != "none" or compute.layout is not None or is_any_offloaded(nodes)

    def run_pattern(carry: Carry, layers: tuple[Tree, Array, Tree]) -> tuple[Carry, Tree]:
        """Runs one layer of each kind: row `row` of the stack."""
        (nodes, row, by_place), stored = layers, {}
        for place, (key, kind) in enumerate(kinds.items()):
            layer_side = with_stored(side, stored) if stored else side
            layer_side = layer_side | {name: array[place] for name, array in by_place.items()}
            run_layer = functools.partial(run, key, kind)
            run_layer = rematerialise(run_layer, compute, nodes) if recompute else run_layer
            carry, memory = run_layer(carry, nodes[key], row, first + row * width + place, layer_side)
            stored |= memory
        return carry, stored

    if compute.scan and stack.repeats > 1 and not isinstance(next(iter(nodes.values())), tuple):
        carry, stored = lax.scan(run_pattern, carry, (nodes, jnp.arange(stack.repeats), by_layer))
        assert not stored, "a layer of a scan would store its memory several times"
        return carry, {}
    return _unroll(run_pattern, stack.repeats, carry, nodes, by_layer)


def _unroll(
    run_pattern: Callable[..., tuple[Carry, Tree]], repeats: int, carry: Carry, nodes: Tree, by_layer: Tree
) -> tuple[Carry, Tree]:
    """Runs the rows of a stack without a scan."""
    memories: Tree = {}
    for row in range(repeats):
        row_nodes = {key: _node_of(node, row) for key, node in nodes.items()}
        caches: Any
        x, caches, sums = carry
        by_row = {key: caches[key] for key in nodes if isinstance(caches.get(key), tuple)}
        before = x, caches | {key: node[row] for key, node in by_row.items()}, sums
        (x, caches, sums), stored = run_pattern(before, (row_nodes, jnp.int32(row), _node_of(by_layer, row)))
        after = {key: (*node[:row], caches[key], *node[row + 1 :]) for key, node in by_row.items()}
        carry, memories = (x, caches | after, sums), memories | stored
    return carry, memories


def _split_by_layer(side: Tree, stack: Stack, first: int) -> tuple[Tree, Tree]:
    """(the side inputs of each layer of a stack [repeats, place in the pattern, ..], those that all layers share)."""
    by_layer = {
        name: array[first : first + stack.layers].reshape(stack.repeats, len(stack.pattern), *array.shape[1:])
        for name, array in side[BY_LAYER].items()
    }
    return by_layer, {name: array for name, array in side.items() if name != BY_LAYER}


def _node_of(nodes: Tree | tuple[Tree, ...], row: int) -> Tree:
    """The node of layer `row` of a stack."""
    return nodes[row] if isinstance(nodes, tuple) else jax.tree.map(lambda leaf: leaf[row], nodes)


def adjusted_buffers(spec: ModelSpec) -> list[str]:
    """The paths of these buffers in the tree of parameters."""
    return [f"{node}/{path}" for node, block, _ in _blocks(spec) for path in sorted(block.adjusted_buffers())]


def adjust_buffers(spec: ModelSpec, buffers: Tree, sums: Sums) -> Tree:
    """The buffers after an update, from those before it and the sums of the layers over the whole update."""
    before, after = flatten(buffers), Leaves()
    for node, block, layers in _blocks(spec):
        of_block = {path: before[f"{node}/{path}"] for path in block.adjusted_buffers()}
        after |= {f"{node}/{path}": leaf for path, leaf in block.adjust(of_block, sums, layers).items()}
    return unflatten(after)


def _blocks(spec: ModelSpec) -> Iterator[tuple[str, Adjusted, Sequence[int]]]:
    """(path of its node, block, the layers of its stacked parameters) for each block with such buffers."""
    for key, _, kind, layers in spec.positions():
        for block in kind.blocks:
            if isinstance(block, Adjusted) and block.adjusted_buffers():
                yield f"layers/{key}/{block.name}", block, layers
