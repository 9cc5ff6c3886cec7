"""Gradients of the active layer alone (optim.blocks): the backward pass ends there, and computes no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, merge
from meshtune.mesh.layout import Layout
from meshtune.model.block import Hidden, Sums, without_memory
from meshtune.model.compute import Compute
from meshtune.model.inputs import SequenceInfo
from meshtune.model.reverse import Layer, backward, forward, row_of
from meshtune.model.spec import ModelSpec, Stack
from meshtune.model.stacks import no_sums
from meshtune.optim.blocks import ActiveBlock, BlockSchedule
from meshtune.optim.optimizer import COUNT, State


@dataclasses.dataclass(frozen=True)
class ActiveBlockRunner:
    """Replaces params["layers"] (model.reverse.LayerRunner): layers with one of them differentiated.

    `differentiated` is one layer's part of everything trained, by key, whose values do not matter: its cotangent is the
    gradient of the active layer.
    """

    differentiated: Tree
    trained: Tree
    frozen: Tree
    active: ActiveBlock

    def apply(
        self,
        layers: Callable[[int], Layer],
        spec: ModelSpec,
        compute: Compute,
        x: Hidden,
        rows: SequenceInfo,
        side: Tree,
    ) -> tuple[Hidden, Sums]:
        """(x after all layers, their sums)."""
        active, sums = (self.active.stack, self.active.place, self.active.row), no_sums(spec.stacks)
        for number, stack in enumerate(spec.stacks):
            keys = [f"{number}.{place}" for place in range(len(stack.pattern))]
            nodes = [
                {key: tree.get(key, {}) for key in keys} for tree in (self.differentiated, self.trained, self.frozen)
            ]
            run = _stack(number, keys, layers(number), stack, compute)
            x, side, sums = run(*nodes, (x, side, sums), rows, active)
        return x, sums


def _stack(number: int, keys: list[str], layer: Layer, stack: Stack, compute: Compute) -> Callable[..., Any]:
    """A stack's forward pass, whose gradient is that of the active layer; `side` leaves it with the memories that its
    layers store."""

    def run_forward(differentiated, trained, frozen, stream, rows, active):
        x, side, sums = stream
        nodes = [merge(trained[key], frozen[key]) for key in keys]
        x, sums, layer_inputs, side = forward(layer, stack, nodes, x, rows, side, sums, compute)
        return (x, side, sums), (differentiated, trained, frozen, layer_inputs, side, rows, active)

    def run_backward(saved, cotangents):
        differentiated, trained, frozen, layer_inputs, side, rows, (active_stack, active_place, active_row) = saved

        def node(_: object, place: int, row: Array) -> tuple[Tree, Tree]:
            return row_of(trained[keys[place]], row), row_of(frozen[keys[place]], row)

        def is_active(place: int, row: Array) -> Array:
            return (active_stack == number) & (active_place == place) & (active_row == row)

        def visit(gradients: Tree, place: int, row: Array, _: Tree, gradient: Tree) -> Tree:
            return gradients | {keys[place]: gradient}

        # Below the active layer only what feeds the layers could still need a cotangent, and that is not trained.
        above = jnp.where(active_stack < number, 0, stack.repeats)
        lowest = jnp.where(active_stack == number, active_row, above)
        d_x, d_side, d_sums = cotangents
        (d_x, d_side, _), gradients = backward(
            layer,
            stack,
            node,
            layer_inputs,
            (d_x, d_side, d_sums),
            rows,
            side,
            visit,
            jax.tree.map(jnp.zeros_like, differentiated),
            merged=merge,
            selected=is_active,
            lowest=lowest,
        )
        for name in (kind.stores for kind in stack.pattern if kind.stores is not None):
            d_side = without_memory(d_side, name)
        return gradients, None, None, (d_x, d_side, d_sums), None, None

    @jax.custom_vjp
    def run(differentiated, trained, frozen, stream, rows, active):
        return run_forward(differentiated, trained, frozen, stream, rows, active)[0]

    run.defvjp(run_forward, run_backward)
    return run


def active_block(
    blocks: BlockSchedule, trainable: Tree, frozen: Tree, state: State
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """(the tree to differentiate in this update, the parameters as an objective takes them with it).

    `state` is the optimizer's, which determines the active layer.
    """
    differentiated = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), blocks.layer)
    active = blocks.active(state[COUNT])
    trained_outside = {name: node for name, node in trainable.items() if name != "layers"}
    outer_params = merge(trained_outside, {name: node for name, node in frozen.items() if name != "layers"})

    def params(differentiated: Tree) -> Tree:
        layers = (differentiated["layers"], trainable["layers"], frozen.get("layers", {}))
        return outer_params | {"layers": ActiveBlockRunner(*layers, active)}

    return differentiated, params


def placed_as(gradient: Tree, arrays: Tree, layout: Layout | None) -> Tree:
    """A layer's gradient summed over the devices' rows and split, as its parameters are."""
    if layout is None:
        return gradient

    def place(leaf: Array, array: ArraySpec) -> Array:
        return jax.lax.with_sharding_constraint(leaf, layout.of(array))

    return jax.tree.map(place, gradient, arrays)
