"""BAdam: AdamW on one layer at a time, the next one after `switch_every` updates (https://arxiv.org/abs/2404.02827).

Gradients and moments exist for one layer; a layer's moments start at zero whenever its turn comes. Embedding, output
head and final norm are not trained, as in the authors' default. Where parameters are narrower than float32, the active
layer has a float32 copy.
"""

from __future__ import annotations

from typing import NoReturn

import jax
import jax.numpy as jnp

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, named_leaves
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec
from meshtune.optim.blocks import BlockSchedule
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import COUNT, PARAM_STATE, Optimizer, Schedule, State, state_like


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
