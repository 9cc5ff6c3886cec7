"""The one train step: a pure function of state, frozen weights and batch.

`train` runs it; planning compiles the very same function for hardware that is not here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree, merge
from meshtune.model.block import Sums
from meshtune.model.compute import Compute, compiler_options, streaming_options
from meshtune.model.spec import ModelSpec
from meshtune.objectives.curvature import curvature
from meshtune.objectives.score import Batch, Objective, Score
from meshtune.optim.optimizer import Optimizer
from meshtune.optim.rounding import add_updates
from meshtune.train.step.accumulate import mean_gradient
from meshtune.train.step.block_coordinate import active_block
from meshtune.train.step.buffers import SummedStep, with_buffers
from meshtune.train.step.host_state import any_on_host, updated_by_rows
from meshtune.train.step.layerwise import layerwise_step
from meshtune.train.step.state import Metrics, TrainState, abstract_state


def make_train_step(
    objective: Objective,
    spec: ModelSpec,
    compute: Compute,
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
    dropout: bool = False,
    abstract: Tree | None = None,
    buffers: Tree | None = None,
) -> jax.stages.Wrapped:
    """A jitted step(state, frozen, batch, seed) -> (state, metrics); `state` is donated.

    Every array of the batch is [A, B, T]: A micro-batches are computed in turn, their losses, weights and gradients
    added in float32, and divided once by the whole weight. Metrics: loss, weight, accuracy ..., grad_norm (before
    clipping), finite (bool) and finite_micro (bool [A]). Where anything is not finite the state is returned as it
    came: the update is not applied. With `compute.layout`, `abstract` are the trainable leaves' ArraySpecs, `buffers`
    those of the state's buffers: state and gradients lie as these say, the batch as `mesh.placement.place_batch` puts
    it, and metrics are on every device.
    """
    layout = compute.layout
    assert layout is None or abstract is not None, "a layout needs the logical axes of what is trained"
    assert compute.remat != "none" or "residual" not in compute.offload, "remat none keeps more than the residual"
    options = {} if compute.dtype == "float32" else compiler_options(compute.platform) or {}
    if optimizer.in_backward:
        assert max_grad_norm is None, "the norm of all gradients is not known before the first is consumed"
        step = layerwise_step(objective, spec, compute, optimizer, abstract, dropout)
        options = {**options, **streaming_options(compute)}
    else:
        step = _accumulated_step(objective, spec, compute, optimizer, abstract, max_grad_norm, dropout)
    step = with_buffers(spec, step)
    if layout is None or abstract is None:
        return jax.jit(step, donate_argnums=0, compiler_options=options or None)
    like = abstract_state(abstract, optimizer, layout, compute.offload, buffers)
    out = jax.tree.map(lambda leaf: leaf.sharding, like), layout.replicated
    return jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=options or None)


def make_eval_step(objective: Objective, spec: ModelSpec, compute: Compute) -> Callable[[Tree, Tree, Batch], Score]:
    """A jitted step(trainable, frozen, batch of [B, T] arrays) -> Score, without dropout and without what the sums of
    its layers come to (objectives.score.with_layers): that is a function of the sums over all batches."""

    def step(trainable: Tree, frozen: Tree, batch: Batch) -> Score:
        return objective(merge(trainable, frozen), spec, compute, batch, None)

    options = None if compute.dtype == "float32" else compiler_options(compute.platform)
    sharding = None if compute.layout is None else compute.layout.replicated
    return jax.jit(step, out_shardings=sharding, compiler_options=options)


def _accumulated_step(
    objective: Objective,
    spec: ModelSpec,
    compute: Compute,
    optimizer: Optimizer,
    abstract: Tree | None,
    max_grad_norm: float | None,
    dropout: bool,
) -> SummedStep:
    """The step of an optimizer that is given the gradient of the whole batch, of all layers or of the active one."""
    placed = _placement(compute, optimizer, abstract)

    def step(state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]) -> tuple[TrainState, Metrics, Sums]:
        rng = jax.random.fold_in(jax.random.key(seed), state.step) if dropout else None
        trained, params = state.trainable, lambda trained: merge(trained, frozen)
        if optimizer.blocks is not None:
            trained, params = active_block(optimizer.blocks, state.trainable, frozen, state.opt_state)
        mean = mean_gradient(objective, spec, compute, trained, params, batch, rng, placed)
        gradient, norm, finite, metrics, sums = mean
        if max_grad_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ does it, the 1e-6 included.
            shrink = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            gradient = jax.tree.map(lambda g: g * shrink, gradient)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, trained)

        def hessian() -> Tree:
            """The curvature along what is trained, from the first micro-batch."""
            first, key = jax.tree.map(lambda x: x[0], batch), jax.random.fold_in(jax.random.key(seed), state.step)
            return placed(curvature(state.trainable, params, spec, compute, first, key))

        return _updated(optimizer, gradient, state, finite, hessian), metrics, sums

    return step


def _placement(compute: Compute, optimizer: Optimizer, abstract: Tree | None) -> Callable[[Tree], Tree]:
    """Lays a gradient out as its parameters are: summed over the devices' rows and split in one go."""
    layout = compute.layout
    if layout is None or abstract is None:
        return lambda gradient: gradient
    arrays = abstract if optimizer.blocks is None else optimizer.blocks.layer
    shardings = jax.tree.map(layout.of, arrays)
    return lambda gradient: jax.tree.map(lax.with_sharding_constraint, gradient, shardings)


def _updated(
    optimizer: Optimizer, gradient: Tree, state: TrainState, finite: Array, hessian: Callable[[], Tree]
) -> TrainState:
    """The state after the update where `finite` says so, else as it came."""
    if optimizer.blocks is not None or any_on_host(state.opt_state):
        update = (
            (lambda *args: updated_by_rows(optimizer, *args)) if optimizer.blocks is None else optimizer.blocks.updated
        )
        trainable, opt_state = update(gradient, state.opt_state, state.trainable, finite)
        return TrainState(jnp.where(finite, state.step + 1, state.step), trainable, opt_state)
    extra = {"curvature": hessian} if optimizer.needs_hessian else {}
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.trainable, **extra)
    trainable = add_updates(state.trainable, updates, state.step, optimizer.stacked, optimizer.rounding)
    new = TrainState(state.step + 1, trainable, opt_state)
    return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
