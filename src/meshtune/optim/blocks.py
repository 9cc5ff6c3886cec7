"""Block-coordinate updates: the layers of a model are trained in turns, one at a time, by AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree, named_leaves, stack_path
from meshtune.optim.adam import direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import COUNT, PARAM_STATE, Schedule, State, UpdateContext, apply_decay


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
