"""BAdam: AdamW on one layer at a time, the next every so many updates (https://arxiv.org/abs/2404.02827).

Gradients and moments exist for one layer; a layer's moments begin at zero whenever its turn comes. Embedding, output
head and final norm stay as they are, as in the authors' default. Where parameters are kept in less than float32, the
layer whose turn it is has a copy in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from meshtune.arrays.paths import named_leaves
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec
from meshtune.optim.adam import direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import COUNT, KEPT, LAYERS, Optimizer, as_spec, single
from meshtune.optim.rule import At, descent
from meshtune.optim.schedules import Schedule

Tree = Any


@dataclasses.dataclass(frozen=True)
class Active:
    """The layer whose turn it is: the stack it is in, its place in the stack's pattern, its row. int32 scalars."""

    stack: Int[Array, ""]
    place: Int[Array, ""]
    row: Int[Array, ""]

    def of(self, key: str) -> Array:
        """Whether it is among params["layers"][key]."""
        stack, place = map(int, key.split("."))
        return (self.stack == stack) & (self.place == place)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The layers that take turns, as (stack, place, row) in the model's order, and how they do."""

    layers: tuple[tuple[int, int, int], ...]
    config: OptimizerConfig
    schedule: Schedule
    decay: dict[str, float]

    def active(self, count: Int[Array, ""]) -> Active:
        """Whose turn it is after `count` updates: a function of that and of the recipe's seed."""
        turn, number = count // self.config.switch_every, len(self.layers)
        match self.config.block_order:
            case "ascending":
                block = turn % number
            case "descending":
                block = number - 1 - turn % number
            case _:  # every layer once, in an order that is drawn anew each time round
                key = jax.random.fold_in(jax.random.key(self.config.seed), turn // number)
                block = jax.random.permutation(key, number)[turn % number]
        return Active(*jnp.asarray(self.layers, jnp.int32)[block])

    def abstract(self, trainable: Tree) -> Tree:
        """One layer of everything stacked, as ArraySpecs: what is differentiated."""
        return jax.tree_util.tree_map(lambda leaf: single(LAYERS, as_spec(leaf)), {"layers": trainable["layers"]})

    def updated(self, gradients: Tree, state: Any, trainable: Tree, apply: Array) -> tuple[Tree, Any]:
        """(trainable leaves, state) after an update of the layer whose turn it is, where `apply` (bool) says so.

        `gradients` are of that layer, in the form of `abstract`.
        """
        count = state[COUNT]
        active, turn = self.active(count), count % self.config.switch_every
        layers, kept = [], {}
        for (path, gradient), stacked in zip(
            named_leaves(gradients), jax.tree.leaves(trainable["layers"]), strict=True
        ):
            mine = apply & active.of(path.split("/")[1])
            at = At(path, active.row, turn, self.schedule(count), self.decay[path])
            parameter = lax.dynamic_index_in_dim(stacked, active.row, keepdims=False)
            new, after = self._one(gradient, state[KEPT][path], parameter, at)
            kept[path] = jax.tree.map(lambda made, was, mine=mine: jnp.where(mine, made, was), after, state[KEPT][path])
            new = jnp.where(mine, new, parameter)
            layers.append(lax.dynamic_update_index_in_dim(stacked, new, active.row, 0))
        layers = jax.tree.unflatten(jax.tree.structure(trainable["layers"]), layers)
        return trainable | {"layers": layers}, {COUNT: jnp.where(apply, count + 1, count), KEPT: kept}

    def _one(self, gradient: Array, state: Any, parameter: Array, at: At) -> tuple[Array, Any]:
        begins = at.count == 0
        start = {name: jnp.where(begins, 0.0, state[name]) for name in ("m", "v")}
        value = parameter.astype(jnp.float32)
        if "copy" in state:
            value = jnp.where(begins, value, state["copy"])
        m, v = moments(self.config, gradient.astype(jnp.float32), start)
        value = value + descent(at, direction(self.config, m, v, at), value)
        copy = {"copy": value} if "copy" in state else {}
        return value.astype(parameter.dtype), {"m": m, "v": v, **copy}


def badam(
    config: OptimizerConfig, schedule: Schedule, trainable: Tree, spec: ModelSpec, decay: dict[str, float]
) -> Optimizer:
    """State: moments of one layer, float32, and where parameters are narrower a copy of it."""
    trained = trainable.get("layers", {})
    found = [
        (number, key, row)
        for key, _, _, numbers in spec.positions()
        for row, number in enumerate(numbers)
        if key in trained
    ]
    layers = tuple((*map(int, key.split(".")), row) for _, key, row in sorted(found))
    if not layers or any("/adapter/" in path for path, _ in named_leaves(trainable)):
        what = "adapters keep little state as they are" if layers else "no layer is trained"
        raise UserError(
            f"badam trains one layer at a time, and {what}",
            where="optimizer.name, method",
            fix="use method: full or freeze with badam, or optimizer.name=adamw",
        )
    blocks = Blocks(layers, config, schedule, decay)  # pyright: ignore[reportArgumentType]

    def specs(abstract: Tree) -> Any:
        kept = {}
        for path, leaf in named_leaves(blocks.abstract(abstract)):
            one = dataclasses.replace(leaf, dtype="float32", init="zeros")
            kept[path] = {"m": one, "v": one} | ({} if leaf.dtype == "float32" else {"copy": one})
        return {COUNT: ArraySpec((), "int32", (), "zeros"), KEPT: kept}

    def init(tree: Tree) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), specs(jax.tree.map(as_spec, tree)))

    def update(gradients: Tree, state: Any, tree: Tree) -> NoReturn:
        raise AssertionError("the gradients of all parameters are never there: see Blocks.updated")

    return Optimizer(init, update, specs, schedule, blocks=blocks)
