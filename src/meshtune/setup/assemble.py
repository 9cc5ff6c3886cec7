"""Builds the train step of a run and the abstract forms of its arguments, for training and for planning."""

from __future__ import annotations

import jax

from meshtune.arrays.tree import Tree
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.mesh.placement import batch_axes, is_table, offload_frozen, offloaded_names, shardings
from meshtune.model.compute import Compute
from meshtune.optim.build import Optimizer, make_optimizer
from meshtune.optim.optimizer import Schedule
from meshtune.setup.choices import optimizer_of
from meshtune.setup.resolved import ResolvedRun
from meshtune.setup.stage import batch_arrays, draws, objective_of
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import TrainState, abstract_state


def optimizer_for(recipe: Recipe, resolved: ResolvedRun, steps: int) -> tuple[Optimizer, Schedule]:
    """Builds the optimizer and the learning-rate schedule of a run of `steps` updates."""
    return make_optimizer(optimizer_of(recipe, resolved.precision), steps, resolved.arrays.trainable, resolved.spec)


def step_for(recipe: Recipe, resolved: ResolvedRun, compute: Compute, optimizer: Optimizer) -> jax.stages.Wrapped:
    """Builds the jitted train step (train.step.build.make_train_step)."""
    return make_train_step(
        objective_of(recipe),
        resolved.spec,
        compute,
        optimizer,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        dropout=draws(recipe, resolved.method),
        abstract=resolved.arrays.trainable,
        buffers=resolved.arrays.buffers,
    )


def state_like(resolved: ResolvedRun, optimizer: Optimizer) -> TrainState:
    """Returns the training state as ShapeDtypeStructs, with shardings if the run has a layout.

    Raises: UserError if the recipe offloads an optimizer state that cannot be updated layer by layer.
    """
    if "optimizer" in resolved.offload and optimizer.update_param is None:
        raise UserError(
            "this optimizer looks at all gradients at once, so its state cannot be brought layer by layer",
            where="optimizer.name, compute.offload",
            fix="leave optimizer out of compute.offload, or use adamw, whose state can wait in the host's memory",
        )
    arrays = resolved.arrays
    return abstract_state(arrays.trainable, optimizer, resolved.layout, resolved.offload, arrays.buffers)


def frozen_like(resolved: ResolvedRun) -> Tree:
    """Returns the frozen weights as ShapeDtypeStructs, with shardings if the run has a layout.

    Raises: UserError if the recipe offloads tables and all of them are trained.
    """
    frozen = resolved.arrays.frozen
    if resolved.layout is None:
        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), frozen)
    else:
        like = jax.tree.map(
            lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
            frozen,
            shardings(frozen, resolved.layout),
        )
    if "tables" in resolved.offload and not any(is_table(leaf) for leaf in jax.tree.leaves(frozen)):
        raise UserError(
            "this method trains the embedding and the output head, and trained tables stay on the device",
            where="compute.offload",
            fix="leave tables out, or train neither",
        )
    return offload_frozen(like, frozen, resolved.offload)


def waiting_weights(resolved: ResolvedRun, optimizer: Optimizer) -> list[str]:
    """Returns the paths of all frozen and trained weights that are offloaded to host memory."""
    return offloaded_names(frozen_like(resolved)) + offloaded_names(state_like(resolved, optimizer).trainable)


def batch_like(recipe: Recipe, resolved: ResolvedRun, shape: tuple[int, int, int]) -> Tree:
    """Returns a batch [micro-batches, rows, positions] of the recipe's stage as ShapeDtypeStructs.

    Its shardings are those of mesh.placement.place_batch.
    """
    layout = resolved.layout
    return {
        name: jax.ShapeDtypeStruct(
            size, dtype, sharding=None if layout is None else layout.sharding(batch_axes(name, len(size)), size)
        )
        for name, (size, dtype) in batch_arrays(recipe, resolved.method, shape).items()
    }
