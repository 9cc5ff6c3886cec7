"""The train step of a run and what it is called with: one place for the run itself and for planning it."""

from __future__ import annotations

import jax

from meshtune.arrays.tree import Tree
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.mesh.placement import batch_axes, offload_stacks, offloaded_names, shardings
from meshtune.model.compute import Compute
from meshtune.optim.build import Optimizer, make_optimizer
from meshtune.optim.schedules import Schedule
from meshtune.setup.choices import optimizer_of
from meshtune.setup.resolved import ResolvedRun
from meshtune.setup.stage import batch_arrays, draws, objective_of
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import TrainState, abstract_state


def optimizer_for(recipe: Recipe, resolved: ResolvedRun, steps: int) -> tuple[Optimizer, Schedule]:
    """(the optimizer, its learning rate by step) of a run of `steps` updates."""
    return make_optimizer(optimizer_of(recipe, resolved.precision), steps, resolved.arrays.trainable, resolved.spec)


def step_for(recipe: Recipe, resolved: ResolvedRun, compute: Compute, optimizer: Optimizer) -> jax.stages.Wrapped:
    """The jitted train step (see train.step.make_train_step)."""
    return make_train_step(
        objective_of(recipe),
        resolved.spec,
        compute,
        optimizer,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        dropout=draws(recipe, resolved.method),
        abstract=resolved.arrays.trainable,
    )


def state_like(resolved: ResolvedRun, optimizer: Optimizer) -> TrainState:
    """The state as ShapeDtypeStructs, laid out where there is a layout.

    Raises: UserError for an optimizer whose state cannot wait in the host's memory, if it is asked to.
    """
    if "optimizer" in resolved.offload and optimizer.update_param is None:
        raise UserError(
            "this optimizer looks at all gradients at once, so its state cannot be brought layer by layer",
            where="optimizer.name, compute.offload",
            fix="leave optimizer out of compute.offload, or use adamw, whose state can wait in the host's memory",
        )
    return abstract_state(resolved.arrays.trainable, optimizer, resolved.layout, resolved.offload)


def frozen_like(resolved: ResolvedRun) -> Tree:
    """The frozen weights as ShapeDtypeStructs, laid out where there is a layout."""
    frozen = resolved.arrays.frozen
    if resolved.layout is None:
        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), frozen)
    else:
        like = jax.tree.map(
            lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
            frozen,
            shardings(frozen, resolved.layout),
        )
    return offload_stacks(like, frozen) if "weights" in resolved.offload else like


def waiting_weights(resolved: ResolvedRun, optimizer: Optimizer) -> list[str]:
    """The paths of the weights that wait in the host's memory, trained ones too."""
    return offloaded_names(frozen_like(resolved)) + offloaded_names(state_like(resolved, optimizer).trainable)


def batch_like(recipe: Recipe, resolved: ResolvedRun, shape: tuple[int, int, int]) -> Tree:
    """A batch [micro-batches, rows, positions] of the recipe's stage as mesh.placement.place_batch lays it."""
    layout = resolved.layout
    return {
        name: jax.ShapeDtypeStruct(
            size, dtype, sharding=None if layout is None else layout.sharding(batch_axes(name), size)
        )
        for name, (size, dtype) in batch_arrays(recipe, resolved.method, shape).items()
    }
