"""The train step of a run and what it is called with: one place for the run itself and for planning it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from meshtune.adapters.config import LoraConfig
from meshtune.config.recipe import Recipe
from meshtune.mesh.placement import BATCH_AXES, shardings
from meshtune.model.compute import Compute
from meshtune.model.tree import Tree
from meshtune.objectives import OBJECTIVES
from meshtune.optim.build import make_optimizer
from meshtune.train.resolve import optimizer_of
from meshtune.train.settle import Settled
from meshtune.train.step import TrainState, abstract_state, make_train_step


def optimizer_for(
    recipe: Recipe, settled: Settled, steps: int
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """(the optimizer, its learning rate by step) of a run of `steps` updates."""
    return make_optimizer(optimizer_of(recipe, settled.precision), steps, settled.arrays.trainable)


def step_for(recipe: Recipe, settled: Settled, compute: Compute, optimizer: optax.GradientTransformation) -> Any:
    """The jitted train step (see train.step.make_train_step)."""
    return make_train_step(
        OBJECTIVES["sft"],
        settled.spec,
        compute,
        optimizer,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        dropout=isinstance(settled.method, LoraConfig) and settled.method.dropout > 0,
        abstract=settled.arrays.trainable,
    )


def state_like(settled: Settled, optimizer: optax.GradientTransformation) -> TrainState:
    """The state as ShapeDtypeStructs, laid out where there is a layout."""
    return abstract_state(settled.arrays.trainable, optimizer, settled.layout)


def frozen_like(settled: Settled) -> Tree:
    """The frozen weights as ShapeDtypeStructs, laid out where there is a layout."""
    frozen = settled.arrays.frozen
    if settled.layout is None:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), frozen)
    return jax.tree.map(
        lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
        frozen,
        shardings(frozen, settled.layout),
    )


def batch_like(settled: Settled, arrays: dict[str, Any], shape: tuple[int, int, int]) -> Tree:
    """A batch [micro-batches, rows, positions] as mesh.placement.place_batch lays it, of `arrays` by name and dtype."""
    where = None if settled.layout is None else settled.layout.sharding(BATCH_AXES, shape)
    return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=where) for name, dtype in arrays.items()}
