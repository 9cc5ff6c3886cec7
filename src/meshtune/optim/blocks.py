"""Optimizers that train one layer at a time, in turns (BAdam, https://arxiv.org/abs/2404.02827).

Gradients and moments exist for one layer; a layer's moments start at zero whenever its turn comes. Embedding, output
head and final norm are not trained, as in the authors' default. Where parameters are narrower than float32, the active
layer has a float32 copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, named_leaves, stack_path
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec
from meshtune.optim.adam import direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import (
    COUNT,
    PARAM_STATE,
    Optimizer,
    Schedule,
    State,
    UpdateContext,
    apply_decay,
    state_like,
)


@dataclasses.dataclass(frozen=True)
class ActiveBlock:
    """The layer that is trained now: its stack, its position in the stack's pattern, its row. int32 scalars."""

    stack: Int[Array, ""]
    place: Int[Array, ""]
    row: Int[Array, ""]

    def of(self, key: str) -> Array:
        """Whether it is among params["layers"][key]."""
        stack, place = map(int, key.split("."))
        return (self.stack == stack) & (self.place == place)


@dataclasses.dataclass(frozen=True)
class BlockSchedule:
    """The layers that are trained in turns, as (stack, place, row) in the model's order.

    `layer` holds the ArraySpecs of one layer of everything stacked that is trained: the tree to differentiate. `decay`
    is the weight decay by path.
    """

    layers: tuple[tuple[int, int, int], ...]
    layer: Tree
    config: OptimizerConfig
    schedule: Schedule
    decay: Mapping[str, float]

    def active(self, count: Int[Array, ""]) -> ActiveBlock:
        """The layer to train after `count` updates, a function of that and of the recipe's seed."""
        turn, layers = count // self.config.switch_every, len(self.layers)
        match self.config.block_order:
            case "ascending":
                block = turn % layers
            case "descending":
                block = layers - 1 - turn % layers
            case _:  # every round takes all layers once, in an order drawn for this round
                key = jax.random.fold_in(jax.random.key(self.config.seed), turn // layers)
                block = jax.random.permutation(key, layers)[turn % layers]
        return ActiveBlock(*jnp.asarray(self.layers, jnp.int32)[block])

    def update(self, gradients: Tree, state: State, trainable: Tree, apply: Array) -> tuple[Tree, State]:
        """(trainable leaves, state) after an update of the active layer, or unchanged where `apply` (bool) is false.

        `gradients` are those of the active layer, in the structure of `layer`.
        """
        count = state[COUNT]
        active, turn = self.active(count), count % self.config.switch_every
        layers, states = [], {}
        for (path, gradient), stacked in zip(
            named_leaves(gradients), jax.tree.leaves(trainable["layers"]), strict=True
        ):
            place = stack_path(path)
            assert place is not None, path
            chosen = apply & active.of(place.key)
            context = UpdateContext(path, active.row, turn, self.schedule(count), self.decay[path])
            parameter = lax.dynamic_index_in_dim(stacked, active.row, keepdims=False)
            before = state[PARAM_STATE][path]
            new, after = self._updated_layer(gradient, before, parameter, context)
            states[path] = jax.tree.map(lambda new, old, chosen=chosen: jnp.where(chosen, new, old), after, before)
            new = jnp.where(chosen, new, parameter)
            layers.append(lax.dynamic_update_index_in_dim(stacked, new, active.row, 0))
        layers = jax.tree.unflatten(jax.tree.structure(trainable["layers"]), layers)
        return trainable | {"layers": layers}, {COUNT: jnp.where(apply, count + 1, count), PARAM_STATE: states}

    def _updated_layer(
        self, gradient: Array, state: State, parameter: Array, context: UpdateContext
    ) -> tuple[Array, State]:
        first = context.count == 0
        start = {name: jnp.where(first, 0.0, state[name]) for name in ("m", "v")}
        value = parameter.astype(jnp.float32)
        if "copy" in state:
            value = jnp.where(first, value, state["copy"])
        m, v = moments(self.config, gradient.astype(jnp.float32), start)
        value = value + apply_decay(context, direction(self.config, m, v, context), value)
        copy = {"copy": value} if "copy" in state else {}
        return value.astype(parameter.dtype), {"m": m, "v": v, **copy}


def badam(
    config: OptimizerConfig, schedule: Schedule, trainable: Tree, spec: ModelSpec, decay: dict[str, float]
) -> Optimizer:
    """State: float32 moments of one layer, and its float32 copy where parameters are narrower.

    `trainable` holds ArraySpecs. Raises UserError where no layer is trained, for adapters, and for a stack outside of
    the decoder's layers, whose turn would never come.
    """
    stacks = trainable.get("layers", {})
    rows = [
        (number, key, row)
        for key, _, _, numbers in spec.positions()
        for row, number in enumerate(numbers)
        if key in stacks
    ]
    layers = tuple((*map(int, key.split(".")), row) for _, key, row in sorted(rows))
    if not layers or any("/adapter/" in path for path, _ in named_leaves(trainable)):
        reason = "adapters keep little state as they are" if layers else "no layer is trained"
        raise UserError(
            f"badam trains one layer at a time, and {reason}",
            where="optimizer.name, method",
            fix="use method: full or freeze with badam, or optimizer.name=adamw",
        )
    other_nodes = {name: node for name, node in trainable.items() if name != "layers"}
    if outside := [path for path, leaf in named_leaves(other_nodes) if leaf.is_stacked]:
        raise UserError(
            f"badam trains the decoder's layers in turns, and {outside[0]} is in another stack",
            where="optimizer.name, method",
            fix="leave it frozen (method: freeze), or use optimizer.name=adamw",
        )
    layer = jax.tree.map(lambda leaf: leaf.layer, {"layers": stacks})
    blocks = BlockSchedule(layers, layer, config, schedule, decay)  # pyright: ignore[reportArgumentType]

    def specs(abstract: Tree) -> State:
        states = {}
        for path, leaf in named_leaves(layer):
            moment = state_like(leaf, "float32")
            states[path] = {"m": moment, "v": moment} | ({} if leaf.dtype == "float32" else {"copy": moment})
        return {COUNT: ArraySpec((), "int32", (), "zeros"), PARAM_STATE: states}

    def init(tree: Tree) -> State:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), specs(tree))

    def update(gradients: Tree, state: State, tree: Tree) -> NoReturn:
        raise AssertionError("the gradients of all parameters never exist at once: see BlockSchedule.updated")

    return Optimizer(init, update, specs, schedule, blocks=blocks)
