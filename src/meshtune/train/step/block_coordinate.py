"""Gradients of the one layer whose turn it is (optim.badam): the backward pass ends there, and makes no others."""

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
from meshtune.model.compute import Compute
from meshtune.model.reverse import Hidden, Layer, backward, forward, row_of
from meshtune.model.spec import ModelSpec, Stack
from meshtune.optim.blocks import ActiveBlock, BlockSchedule
from meshtune.optim.param_optimizer import COUNT


@dataclasses.dataclass(frozen=True)
class FocusedLayers:
    """Stands at params["layers"]: layers of which one is differentiated, with respect to `learned`.

    `learned` is one layer's part of everything trained, by key, whose values do not matter: its cotangent is the
    gradient of the active layer.
    """

    learned: Tree
    trained: Tree
    frozen: Tree
    active: ActiveBlock

    def through(
        self, layer: Callable[[int], Layer], spec: ModelSpec, compute: Compute, x: Hidden, shared: Any
    ) -> Hidden:
        """x after all layers."""
        where = (self.active.stack, self.active.place, self.active.row)
        for number, stack in enumerate(spec.stacks):
            keys = [f"{number}.{place}" for place in range(len(stack.pattern))]
            here = [{key: tree.get(key, {}) for key in keys} for tree in (self.learned, self.trained, self.frozen)]
            through = self._stack(number, keys, layer(number), stack, compute)
            x = through(here[0], here[1], here[2], x, shared, where)
        return x

    def _stack(
        self, number: int, keys: list[str], layer: Layer, stack: Stack, compute: Compute
    ) -> Callable[..., Hidden]:
        def ahead(learned, trained, frozen, x, shared, where):
            nodes = [merge(trained[key], frozen[key]) for key in keys]
            x, entering = forward(layer, stack, nodes, x, shared, compute)
            return x, (learned, trained, frozen, entering, shared, where)

        def back(kept, cotangent):
            learned, trained, frozen, entering, shared, (of_stack, of_place, of_row) = kept

            def node(_: Any, place: int, row: Array) -> tuple[Tree, Tree]:
                return row_of(trained[keys[place]], row), row_of(frozen[keys[place]], row)

            def wanted(place: int, row: Array) -> Array:
                return (of_stack == number) & (of_place == place) & (of_row == row)

            def visit(found: Tree, place: int, row: Array, _: Tree, gradient: Tree) -> Tree:
                return found | {keys[place]: gradient}

            above = jnp.where(of_stack < number, 0, stack.repeats)
            lowest = jnp.where(of_stack == number, of_row, above)
            nothing = jax.tree.map(jnp.zeros_like, learned)
            cotangent, found = backward(
                layer,
                stack,
                node,
                entering,
                cotangent,
                shared,
                visit,
                nothing,
                merged=merge,
                wanted=wanted,
                lowest=lowest,
            )
            return found, None, None, cotangent, None, None

        @jax.custom_vjp
        def through(learned, trained, frozen, x, shared, where):
            return ahead(learned, trained, frozen, x, shared, where)[0]

        through.defvjp(ahead, back)
        return through


def focused(blocks: BlockSchedule, trainable: Tree, frozen: Tree, state: Any) -> tuple[Tree, Callable[[Tree], Tree]]:
    """(what is differentiated in this update, the parameters as an objective takes them with it).

    `state` is the optimizer's, which knows whose turn it is.
    """
    learned = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), blocks.layer)
    active = blocks.active(state[COUNT])
    outside = {name: node for name, node in trainable.items() if name != "layers"}
    around = merge(outside, {name: node for name, node in frozen.items() if name != "layers"})

    def params(learned: Tree) -> Tree:
        layers = (learned["layers"], trainable["layers"], frozen.get("layers", {}))
        return around | {"layers": FocusedLayers(*layers, active)}

    return learned, params


def laid_out(gradient: Tree, arrays: Tree, layout: Layout | None) -> Tree:
    """A layer's gradient summed over the devices' rows and split, as its parameters are."""
    if layout is None:
        return gradient

    def one(leaf: Array, array: ArraySpec) -> Array:
        return jax.lax.with_sharding_constraint(leaf, layout.of(array))

    return jax.tree.map(one, gradient, arrays)
