"""Explicit forward and backward over a stack of layers: saves only each layer's input, and passes each layer's
gradients to a callback as soon as they are computed.

A step that consumes gradients during the backward pass, or that needs those of a single layer, puts a `LayerRunner` at
params["layers"]. The decoder hands its layers over to that; all else of a model, and every objective, is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from meshtune.arrays.tree import Tree
from meshtune.model.block import SHARED, Context, Hidden, Sums, layer_side, with_stored
from meshtune.model.compute import Compute
from meshtune.model.gather import gather_layer_params, is_offloaded, to_device
from meshtune.model.inputs import SequenceInfo
from meshtune.model.layer import layer, layer_by_chunks
from meshtune.model.spec import ModelSpec, Stack
from meshtune.model.stacks import RESIDUAL, add_sums, no_sums

# (x, one layer's parameters as they are stored, place in the pattern, row in the stack, rows, side inputs)
# -> (x, sums, memories for later layers)
Layer = Callable[[Hidden, Tree, int, Array, SequenceInfo, Tree], tuple[Hidden, Sums, Tree]]
# (carry, place in the pattern, row, the layer's trained parameters, their gradient) -> carry
Visit = Callable[[PyTree, int, Array, Tree, Tree], PyTree]

HOST = jax.memory.Space.Host


class LayerRunner(Protocol):
    """Runs the layers of one pass of the model, at params["layers"] in place of stacked parameters."""

    def apply(
        self,
        layers: Callable[[int], Layer],
        spec: ModelSpec,
        compute: Compute,
        x: Hidden,
        rows: SequenceInfo,
        side: Tree,
    ) -> tuple[Hidden, Sums]:
        """(x after all layers, their sums); `layers(s)` is the function of a layer of stack s."""
        ...


def single_layer(spec: ModelSpec, compute: Compute, stack: int) -> Layer:
    """The function of one layer of a stack, by its place in the pattern, for the layer-by-layer backward pass."""
    first = sum(earlier.layers for earlier in spec.stacks[:stack])
    pattern = spec.stacks[stack].pattern
    compute_layer = layer if compute.attention_chunk is None else layer_by_chunks

    def apply(
        x: Hidden, node: Tree, place: int, row: Array, rows: SequenceInfo, side: Tree
    ) -> tuple[Hidden, Sums, Tree]:
        node = gather_layer_params(node, pattern[place], spec.embed, compute)
        number = first + row * len(pattern) + place
        output = compute_layer(x, node, pattern[place], Context(compute, rows, layer_side(side, number), number))
        return output.y, add_sums(no_sums(spec.stacks), output.sums), dict(output.stored)

    return apply


def layer_functions(spec: ModelSpec, compute: Compute) -> Callable[[int], Layer]:
    """`single_layer` by the number of the stack."""
    return functools.partial(single_layer, spec, compute)


def forward(
    layer: Layer,
    stack: Stack,
    nodes: list[Tree],
    x: Hidden,
    rows: SequenceInfo,
    side: Tree,
    sums: Sums,
    compute: Compute,
) -> tuple[Hidden, Sums, list[Array], Tree]:
    """(x after the stack, `sums` with the stack's, the layers' inputs: [repeats, B, T, D] by place in the pattern,
    `side` with the memories that the stack's layers store).

    `nodes` are the stacked parameters of every place. With "residual" in compute.offload the inputs are kept in the
    host's memory.
    """
    offload = RESIDUAL in compute.offload

    def group(stream: tuple[Hidden, Sums], row: Array) -> tuple[tuple[Hidden, Sums], tuple[list[Array], Tree]]:
        x, sums = stream
        layer_inputs, stored = [], {}
        for place in range(len(stack.pattern)):
            layer_inputs.append(jax.device_put(x, HOST) if offload else x)
            x, new, left = layer(x, row_of(nodes[place], row), place, row, rows, with_stored(side, stored))
            sums, stored = jax.tree.map(jnp.add, sums, new), stored | left
        return (x, sums), (layer_inputs, stored)

    (x, sums), (layer_inputs, stored) = lax.scan(group, (x, sums), jnp.arange(stack.repeats))
    return x, sums, layer_inputs, with_stored(side, jax.tree.map(lambda leaf: leaf[0], stored))


def backward(
    layer: Layer,
    stack: Stack,
    node: Callable[[PyTree, int, Array], tuple[Tree, Tree]],
    layer_inputs: list[Array],
    cotangents: tuple[Hidden, Tree, Sums],
    rows: SequenceInfo,
    side: Tree,
    visit: Visit,
    carry: PyTree,
    *,
    merged: Callable[[Tree, Tree], Tree],
    selected: Callable[[int, Array], Array] | None = None,
    lowest: Int[Array, ""] | int = 0,
    between: Callable[[PyTree, int, Array, Hidden, Hidden], tuple[PyTree, Hidden]] | None = None,
) -> tuple[tuple[Hidden, Tree, Sums], PyTree]:
    """(cotangents, carry) after the layers from the top of a stack down to row `lowest`.

    `side` has all memories that the stack's layers read or store. `cotangents` are those of the residual stream that
    leaves the stack, of `side` as far as layers above have added to them, and of the sums, which are the same for every
    layer. That of a memory is complete at the layer which stores it, and is no longer needed below.
    `node(carry, place, row)` is a layer's parameters, (trained, frozen), which `merged` puts together. Every layer is
    computed again from its input; gradients of parameters are computed only where `selected(place, row)` says so.
    `between(carry, place, row, cotangent, output)`, (carry, cotangent), is called when a layer has been computed again
    and its gradient is not yet begun.
    """
    d_sums = cotangents[2]

    def back(place: int, row: Array, carry: PyTree, d_x: Hidden, d_side: Tree) -> tuple[Hidden, Tree, PyTree]:
        trained, frozen = node(carry, place, row)
        x = to_device(row_of(layer_inputs[place], row))
        # What is computed again must not be shared with the forward pass, as the compiler would do if left alone.
        x, d_x = lax.optimization_barrier((x, d_x))
        name = stack.pattern[place].stores
        d_stored = {} if name is None else {name: d_side[SHARED][name]}

        def with_gradient(carry: PyTree) -> tuple[Hidden, Tree, PyTree]:
            (output, *_), pull = jax.vjp(
                lambda t, x, side: layer(x, merged(t, frozen), place, row, rows, side), trained, x, side
            )
            d_output = d_x
            if between is not None:
                carry, d_output = between(carry, place, row, d_output, output)
            gradient, d_input, d_side_input = pull((d_output, d_sums, d_stored))
            return d_input, jax.tree.map(jnp.add, d_side, d_side_input), visit(carry, place, row, trained, gradient)

        def without(carry: PyTree) -> tuple[Hidden, Tree, PyTree]:
            _, pull = jax.vjp(lambda x, side: layer(x, merged(trained, frozen), place, row, rows, side), x, side)
            d_input, d_side_input = pull((d_x, d_sums, d_stored))
            return d_input, jax.tree.map(jnp.add, d_side, d_side_input), carry

        if selected is None:
            return with_gradient(carry)
        return lax.cond(selected(place, row), with_gradient, without, carry)

    def group(number: Array, running: tuple[Hidden, Tree, PyTree]) -> tuple[Hidden, Tree, PyTree]:
        d_x, d_side, carry = running
        row = stack.repeats - 1 - number
        for place in reversed(range(len(stack.pattern))):
            d_x, d_side, carry = back(place, row, carry, d_x, d_side)
        return d_x, d_side, carry

    d_x, d_side, carry = lax.fori_loop(0, stack.repeats - lowest, group, (cotangents[0], cotangents[1], carry))
    return (d_x, d_side, d_sums), carry


def row_of(tree: PyTree, row: Array) -> PyTree:
    """One layer's part of stacked arrays, in the same memory as they."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), tree)


def with_row(tree: PyTree, new: PyTree, row: Array) -> PyTree:
    """Stacked arrays with one layer's part replaced, in the same memory as before."""

    def write(leaf: Array, part: Array) -> Array:
        part = part.astype(leaf.dtype)
        part = jax.device_put(part, HOST) if is_offloaded(leaf) else part
        return lax.dynamic_update_index_in_dim(leaf, part, row, 0)

    return jax.tree.map(write, tree, new)
