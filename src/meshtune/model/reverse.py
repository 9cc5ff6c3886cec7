"""A stack of layers gone through by hand: forward keeping the stream that enters each layer and nothing else, and back
again with the gradient of every layer's parameters handed over as soon as it is made.

A step that uses gradients up in the backward pass, or that wants those of a single layer, puts something of its own at
params["layers"]: `LayersWalked`. The decoder hands its layers over to that; all else of a model, and every objective,
is as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.in_use import here, on_host
from meshtune.model.spec import ModelSpec, Stack

Hidden = Float[Array, "B T D"]
# (x, one layer's parameters as they are stored, place in the pattern, row, what all layers share) -> x
Layer = Callable[[Hidden, Tree, int, Array, Any], Hidden]
# (carry, place in the pattern, row, what is trained there, its gradient) -> carry
Visit = Callable[[Any, int, Array, Tree, Tree], Any]

RESIDUAL = "residual"  # the stream that enters a group of layers
HOST = jax.memory.Space.Host


class LayersWalked(Protocol):
    """What may stand at params["layers"] in the place of stacked parameters, for one pass of the model."""

    def through(
        self, layer: Callable[[int], Layer], spec: ModelSpec, compute: Compute, x: Hidden, shared: Any
    ) -> Hidden:
        """x after all layers; `layer(s)` is the function of a layer of stack s, `shared` what it needs of the rows."""
        ...


def forward(
    layer: Layer, stack: Stack, nodes: list[Tree], x: Hidden, shared: Any, compute: Compute
) -> tuple[Hidden, list[Array]]:
    """(x after the stack, the stream that enters each layer: [repeats, B, T, D] for every place in the pattern).

    `nodes` are the stacked parameters of every place. With "residual" in compute.offload the streams wait on the host.
    """
    away = RESIDUAL in compute.offload

    def group(x: Hidden, row: Array) -> tuple[Hidden, list[Array]]:
        entering = []
        for place in range(len(stack.pattern)):
            entering.append(jax.device_put(x, HOST) if away else x)
            x = layer(x, row_of(nodes[place], row), place, row, shared)
        return x, entering

    return lax.scan(group, x, jnp.arange(stack.repeats))


def backward(
    layer: Layer,
    stack: Stack,
    node: Callable[[Any, int, Array], tuple[Tree, Tree]],
    entering: list[Array],
    cotangent: Hidden,
    shared: Any,
    visit: Visit,
    carry: Any,
    *,
    merged: Callable[[Tree, Tree], Tree],
    wanted: Callable[[int, Array], Array] | None = None,
    lowest: Int[Array, ""] | int = 0,
    between: Callable[[Any, int, Array, Hidden, Hidden], tuple[Any, Hidden]] | None = None,
) -> tuple[Hidden, Any]:
    """(the cotangent of the stream that enters row `lowest`, carry) from that of the stream that leaves the stack.

    `node(carry, place, row)` is a layer's parameters, (trained, frozen), which `merged` puts together. Every layer is
    made again from the stream that entered it; gradients are made only where `wanted(place, row)` says so.
    `between(carry, place, row, cotangent, stream)`, (carry, cotangent), comes when a layer is made again and its
    gradient is not begun; `stream` is what leaves it.
    """

    def back(place: int, row: Array, carry: Any, cotangent: Hidden) -> tuple[Hidden, Any]:
        trained, frozen = node(carry, place, row)
        x = here(row_of(entering[place], row))
        # Whatever is made again belongs here: left alone, the compiler would share it with the forward pass.
        x, cotangent = lax.optimization_barrier((x, cotangent))

        def with_gradient(carry: Any) -> tuple[Hidden, Any]:
            leaving, pull = jax.vjp(lambda t, x: layer(x, merged(t, frozen), place, row, shared), trained, x)
            slope = cotangent
            if between is not None:
                carry, slope = between(carry, place, row, slope, leaving)
            gradient, below = pull(slope)
            return below, visit(carry, place, row, trained, gradient)

        def without(carry: Any) -> tuple[Hidden, Any]:
            _, pull = jax.vjp(lambda x: layer(x, merged(trained, frozen), place, row, shared), x)
            return pull(cotangent)[0], carry

        if wanted is None:
            return with_gradient(carry)
        return lax.cond(wanted(place, row), with_gradient, without, carry)

    def group(number: Array, running: tuple[Hidden, Any]) -> tuple[Hidden, Any]:
        cotangent, carry = running
        row = stack.repeats - 1 - number
        for place in reversed(range(len(stack.pattern))):
            cotangent, carry = back(place, row, carry, cotangent)
        return cotangent, carry

    return lax.fori_loop(0, stack.repeats - lowest, group, (cotangent, carry))


def row_of(tree: Any, row: Array) -> Any:
    """One layer's part of stacked arrays, in the memory they lie in."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), tree)


def with_row(tree: Any, new: Any, row: Array) -> Any:
    """Stacked arrays with one layer's part replaced, in the memory they lie in."""

    def one(leaf: Array, part: Array) -> Array:
        part = part.astype(leaf.dtype)
        part = jax.device_put(part, HOST) if on_host(leaf) else part
        return lax.dynamic_update_index_in_dim(leaf, part, row, 0)

    return jax.tree.map(one, tree, new)
