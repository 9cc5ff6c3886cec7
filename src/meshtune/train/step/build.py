"""The one train step: a pure function of state, frozen weights and batch.

`train` runs it; planning compiles the very same function for hardware that is not here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, merge
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import is_on_host, real, waiting
from meshtune.model.compute import Compute, compiler_options, streaming_options
from meshtune.model.spec import ModelSpec
from meshtune.objectives.curvature import curvature
from meshtune.objectives.score import Batch, Objective, Score, metric_means
from meshtune.optim.optimizer import Optimizer
from meshtune.train.step.block_coordinate import focused
from meshtune.train.step.host_state import any_on_host, updated_by_rows
from meshtune.train.step.layerwise import fused_step

Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes: updates made so far, the trainable leaves, the optimizer's state."""

    step: Int[Array, ""]
    trainable: Tree
    opt_state: Any


def abstract_state(
    abstract: Tree, optimizer: Optimizer, layout: Layout | None = None, offload: Collection[str] = ()
) -> TrainState:
    """The state of trainable ArraySpecs, as ShapeDtypeStructs; with a layout, each with its sharding.

    With "optimizer" in `offload` what the optimizer keeps lies in the host's memory; with "weights", and an optimizer
    that updates layer by layer, what is trained does.
    """
    state = TrainState(ArraySpec((), "int32", ()), abstract, optimizer.specs(abstract))  # pyright: ignore[reportArgumentType]

    def one(array: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=None if layout is None else layout.of(array))

    like = jax.tree.map(one, state)
    if "weights" in offload and optimizer.in_backward:
        like = dataclasses.replace(like, trainable=waiting(like.trainable))
    if "optimizer" in offload:
        like = dataclasses.replace(like, opt_state=waiting(like.opt_state))
    return like


def init_state(trainable: Tree, optimizer: Optimizer, like: TrainState | None = None) -> TrainState:
    """The state before the first update; what the optimizer keeps lies as in `like`, an `abstract_state`."""
    make = optimizer.init
    if like is not None and any(is_on_host(leaf.sharding) for leaf in jax.tree.leaves(like.opt_state)):
        make = functools.partial(_begun_apart, make, like=like.opt_state)
    elif like is not None:
        make = jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like.opt_state))
    zero = np.zeros((), np.int32)
    step = jnp.asarray(zero) if like is None else jax.device_put(zero, like.step.sharding)
    return TrainState(step, trainable, make(trainable))


def _begun_apart(init: Callable[[Tree], Any], trainable: Tree, like: Any) -> Any:
    """What an optimizer starts from, leaf by leaf: the device may not hold all that the host does."""
    leaves, structure = jax.tree.flatten(like)

    def leaf(number: int) -> Array:
        where = real(leaves[number].sharding)
        return jax.jit(lambda tree: jax.tree.leaves(init(tree))[number], out_shardings=where)(trainable)

    return jax.tree.unflatten(structure, [leaf(number).block_until_ready() for number in range(len(leaves))])


def make_train_step(
    objective: Objective,
    spec: ModelSpec,
    compute: Compute,
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
    dropout: bool = False,
    abstract: Tree | None = None,
) -> Callable[[TrainState, Tree, Batch, Array], tuple[TrainState, Metrics]]:
    """A jitted step(state, frozen, batch, seed) -> (state, metrics); `state` is donated.

    Every array of the batch is [A, B, T]: A micro-batches are computed in turn, their losses, weights and gradients
    added in float32, and divided once by the whole weight. Metrics: loss, weight, accuracy ..., grad_norm (before
    clipping), finite (bool) and finite_micro (bool [A]). Where anything is not finite the state is returned as it
    came: the update is not applied. With `compute.layout`, `abstract` are the trainable leaves' ArraySpecs: state and
    gradients lie as these say, the batch as `mesh.placement.place_batch` puts it, and metrics are on every device.
    """
    layout = compute.layout
    assert layout is None or abstract is not None, "a layout needs the logical axes of what is trained"
    assert compute.remat != "none" or "residual" not in compute.offload, "remat none keeps more than the residual"
    blocks = optimizer.blocks
    like = None if layout is None or abstract is None else abstract_state(abstract, optimizer, layout, compute.offload)

    slopes = None if like is None else like.trainable  # where gradients lie
    if blocks is not None and layout is not None:
        slopes = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout.of(array)),
            blocks.layer,
        )

    def placed(gradient: Tree) -> Tree:
        """Summed over the devices' rows and split in one go, before anything is kept."""
        if slopes is None:
            return gradient
        return jax.tree.map(lambda g, leaf: lax.with_sharding_constraint(g, leaf.sharding), gradient, slopes)

    def score(learned: Tree, params: Callable[[Tree], Tree], micro: Batch, rng: Array | None) -> tuple[Array, Score]:
        scored = objective(params(learned), spec, compute, micro, rng)
        return scored.loss, scored

    def bend(state: TrainState, params: Callable[[Tree], Tree], batch: Batch, seed: Int[Array, ""]) -> Tree:
        """The curvature along what is trained, from the first micro-batch."""
        first, key = jax.tree.map(lambda x: x[0], batch), jax.random.fold_in(jax.random.key(seed), state.step)
        return placed(curvature(state.trainable, params, spec, compute, first, key))

    def step(state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        own = jax.random.fold_in(jax.random.key(seed), state.step) if dropout else None
        learned, params = state.trainable, lambda learned: merge(learned, frozen)
        if blocks is not None:
            learned, params = focused(blocks, state.trainable, frozen, state.opt_state)

        def micro_batch(number: Array, micro: Batch) -> tuple[Score, Tree, Array]:
            rng = None if own is None else jax.random.fold_in(own, number)
            (_, scored), gradient = jax.value_and_grad(score, has_aux=True)(learned, params, micro, rng)
            gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
            gradient = placed(gradient)
            return scored, gradient, jnp.isfinite(scored.loss) & jnp.isfinite(optax.global_norm(gradient))

        total, gradient, finite_micro = _accumulate(micro_batch, batch)
        weight = jnp.where(total.weight > 0, total.weight, 1.0)
        gradient = jax.tree.map(lambda g: g / weight, gradient)
        norm = optax.global_norm(gradient)
        finite = jnp.all(finite_micro) & jnp.isfinite(norm)
        if max_grad_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ does it, the 1e-6 included.
            shrink = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            gradient = jax.tree.map(lambda g: g * shrink, gradient)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, learned)
        if blocks is not None:
            trainable, opt_state = blocks.updated(gradient, state.opt_state, state.trainable, finite)
            state = TrainState(jnp.where(finite, state.step + 1, state.step), trainable, opt_state)
        elif any_on_host(state.opt_state):
            trainable, opt_state = updated_by_rows(optimizer, gradient, state.opt_state, state.trainable, finite)
            state = TrainState(jnp.where(finite, state.step + 1, state.step), trainable, opt_state)
        else:
            seen: dict[str, Any] = {}
            if optimizer.needs_hessian:
                seen["curvature"] = lambda: bend(state, params, batch, seed)
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.trainable, **seen)
            trainable = cast(Tree, optax.apply_updates(state.trainable, updates))
            new = TrainState(state.step + 1, trainable, opt_state)
            state = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        metrics = metric_means(total) | {
            "loss": total.loss / weight,
            "weight": total.weight,
            "grad_norm": norm,
            "finite": finite,
            "finite_micro": finite_micro,
        }
        return state, metrics

    def at_once(state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        """The step of a fused optimizer, which adds up nothing and clips nothing."""
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), state.step), 0) if dropout else None
        made = fused_step(objective, spec, compute, cast(Optimizer, optimizer), abstract)
        trainable, opt_state, metrics = made(state.trainable, state.opt_state, frozen, batch, rng)
        finite = metrics["finite"]
        return TrainState(jnp.where(finite, state.step + 1, state.step), trainable, opt_state), metrics

    if optimizer.in_backward:
        assert max_grad_norm is None, "the norm of all gradients is not known before the first is used up"
        step = at_once
    options = {} if compute.dtype == "float32" else compiler_options(compute.platform) or {}
    options = {**options, **(streaming_options(compute) if step is at_once else {})} or None
    if like is None or layout is None:
        return jax.jit(step, donate_argnums=0, compiler_options=options)
    kept = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(step, donate_argnums=0, out_shardings=(kept, layout.replicated), compiler_options=options)


def make_eval_step(objective: Objective, spec: ModelSpec, compute: Compute) -> Callable[[Tree, Tree, Batch], Score]:
    """A jitted step(trainable, frozen, batch of [B, T] arrays) -> Score, without dropout."""

    def step(trainable: Tree, frozen: Tree, batch: Batch) -> Score:
        return objective(merge(trainable, frozen), spec, compute, batch, None)

    options = None if compute.dtype == "float32" else compiler_options(compute.platform)
    where = None if compute.layout is None else compute.layout.replicated
    return jax.jit(step, out_shardings=where, compiler_options=options)


def _accumulate(
    micro_batch: Callable[[Array, Batch], tuple[Score, Tree, Array]], batch: Batch
) -> tuple[Score, Tree, Float[Array, "A"]]:
    """(summed scores, summed gradients, finite flag of each micro-batch)."""
    count = batch["tokens"].shape[0]
    if count == 1:
        scored, gradient, finite = micro_batch(jnp.int32(0), jax.tree.map(lambda x: x[0], batch))
        return scored, gradient, finite[None]

    def add(carry: tuple[Score, Tree], x: tuple[Array, Batch]) -> tuple[tuple[Score, Tree], Array]:
        scored, gradient, finite = micro_batch(*x)
        return jax.tree.map(jnp.add, carry, (scored, gradient)), finite

    numbers = jnp.arange(count)
    shapes = jax.eval_shape(micro_batch, numbers[0], jax.tree.map(lambda x: x[0], batch))[:2]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (scored, gradient), finite = lax.scan(add, zeros, (numbers, batch))
    return scored, gradient, finite
