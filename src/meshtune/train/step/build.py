"""The one train step: a pure function of state, frozen weights and batch."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshtune.arrays.tree import Tree, merge
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.model.block import Sums
from meshtune.model.compute import Compute, compiler_options, streaming_options
from meshtune.model.gather import is_any_offloaded
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import adjust_buffers, layers_loss, no_sums
from meshtune.objectives.answers import Batch, LossSums, Objective, add_sums, metric_means, with_layers
from meshtune.optim.optimizer import Optimizer, add_updates
from meshtune.train.step.loss_scale import DTYPE as FLOAT16
from meshtune.train.step.loss_scale import next_loss_scale
from meshtune.train.step.state import Metrics, TrainState, abstract_state

# Steps of some optimizers, and of arrays in the host's memory.
active_block = LazyFunction("meshtune.train.step.block_coordinate:active_block")
curvature = LazyFunction("meshtune.objectives.curvature:curvature")
layerwise_step = LazyFunction("meshtune.train.step.layerwise:layerwise_step")
updated_by_rows = LazyFunction("meshtune.train.step.host_state:updated_by_rows")


class Gradient(NamedTuple):
    """The gradient of the mean loss over a batch, float32, its norm, whether all of it is finite, metrics, and the sums
    of the layers."""

    tree: Tree
    norm: Float[Array, ""]
    finite: Bool[Array, ""]
    metrics: Metrics
    sums: Sums


def mean_gradient(
    objective: Objective,
    spec: ModelSpec,
    compute: Compute,
    trained: Tree,
    all_params: Callable[[Tree], Tree],
    batch: Batch,
    rng: Array | None,
    place: Callable[[Tree], Tree],
    scale: Array | None = None,
) -> Gradient:
    """The gradient of the mean loss with respect to `trained`; `all_params(trained)` adds the frozen parameters.

    With a `scale` the backward pass of each micro-batch is of `scale` times its share of the mean loss, as if all had
    the same weight, and its float32 gradient is multiplied back.

    Every array of the batch is [A, B, T], of A micro-batches. `place` lays a gradient out over the mesh. The layers'
    loss is a function of their sums over all micro-batches, which is not linear: where there are several, a forward
    pass over all of them comes first, for its derivative by these sums.
    """

    def loss_sums_of(trained: Tree, index: Array, micro: Batch) -> LossSums:
        key = None if rng is None else jax.random.fold_in(rng, index)
        return objective(all_params(trained), spec, compute, micro, key)

    has_sums, sums_of = bool(no_sums(spec.stacks)), functools.partial(loss_sums_of, trained)
    loss_of = _loss_with_layers(sums_of, spec, batch) if has_sums else operator.attrgetter("loss")
    scaling = None if scale is None else _LossScaling(scale, batch["tokens"].shape[0])

    def loss(trained: Tree, index: Array, micro: Batch) -> tuple[Array, LossSums]:
        loss_sums = loss_sums_of(trained, index, micro)
        return (loss_of(loss_sums) if scaling is None else loss_of(loss_sums) * scaling.factor(loss_sums)), loss_sums

    def micro_batch(index: Array, micro: Batch) -> tuple[LossSums, Tree, Array]:
        (_, loss_sums), gradient = jax.value_and_grad(loss, has_aux=True)(trained, index, micro)
        gradient = place(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))
        gradient = gradient if scaling is None else scaling.unscale(gradient, loss_sums)
        return loss_sums, gradient, jnp.isfinite(loss_sums.loss) & jnp.isfinite(optax.global_norm(gradient))

    total, gradient, finite_micro = _accumulate(micro_batch, batch)
    sums, total = total.layers, with_layers(spec, total) if has_sums else total
    weight = jnp.where(total.weight > 0, total.weight, 1.0)
    gradient = jax.tree.map(lambda g: g / weight, gradient)
    norm = optax.global_norm(gradient)
    finite = jnp.all(finite_micro) & jnp.isfinite(norm)
    metrics = {"loss": total.loss / weight, "weight": total.weight, "grad_norm": norm, "finite": finite}
    return Gradient(gradient, norm, finite, metric_means(total) | metrics | {"finite_micro": finite_micro}, sums)


class _LossScaling(NamedTuple):
    """The loss of each of `count` micro-batches is multiplied by a factor for its backward pass."""

    scale: Array
    count: int

    def factor(self, loss_sums: LossSums) -> Array:
        """The scale over the weight of a micro-batch."""
        return self.scale / (self.count * jnp.maximum(jax.lax.stop_gradient(loss_sums.weight), 1.0))

    def unscale(self, gradient: Tree, loss_sums: LossSums) -> Tree:
        """The gradient of the loss itself."""
        back = 1.0 / self.factor(loss_sums)
        return jax.tree.map(lambda g: g * back, gradient)


def _accumulate(
    micro_batch: Callable[[Array, Batch], tuple[LossSums, Tree, Array]], batch: Batch
) -> tuple[LossSums, Tree, Float[Array, "A"]]:
    """(summed losses, summed gradients, finite flag of each micro-batch)."""
    indices, first = jnp.arange(batch["tokens"].shape[0]), jax.tree.map(lambda x: x[0], batch)
    if len(indices) == 1:
        loss_sums, gradient, finite = micro_batch(jnp.int32(0), first)
        return loss_sums, gradient, finite[None]

    def add(carry: tuple[LossSums, Tree], x: tuple[Array, Batch]) -> tuple[tuple[LossSums, Tree], Array]:
        loss_sums, gradient, finite = micro_batch(*x)
        total, total_gradient = carry
        return (add_sums(total, loss_sums), jax.tree.map(jnp.add, total_gradient, gradient)), finite

    # The rows of a rollout are more than its completions fill, and those that are empty cost nothing.
    body: Callable[[Any, Any], tuple[Any, Array]] = _skip_empty_rows(add) if "completion" in batch else add
    shapes = jax.eval_shape(micro_batch, indices[0], first)[:2]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (loss_sums, gradient), finite = lax.scan(body, zeros, (indices, batch))
    return loss_sums, gradient, finite


def _skip_empty_rows(add: Callable[[Any, Any], tuple[Any, Array]]) -> Callable[[Any, Any], tuple[Any, Array]]:
    """Adds nothing for a micro-batch (its index, its arrays) of padding."""

    def add_rows(carry: Any, x: Any) -> tuple[Any, Array]:
        has_tokens = jnp.any(x[1]["segment_ids"] > 0)
        return lax.cond(has_tokens, lambda: add(carry, x), lambda: (carry, jnp.bool_(True)))

    return add_rows


def _loss_with_layers(
    loss_sums_of: Callable[[Array, Batch], LossSums], spec: ModelSpec, batch: Batch
) -> Callable[[LossSums], Array]:
    """The loss of a micro-batch with the layers' part, whose derivative is that by the sums of all micro-batches."""
    by_sums = _gradient_by_sums(loss_sums_of, spec, batch) if batch["tokens"].shape[0] > 1 else None
    if by_sums is None:
        return lambda loss_sums: with_layers(spec, loss_sums).loss
    return lambda loss_sums: (
        loss_sums.loss + sum(jnp.sum(by_sums[name] * value) for name, value in loss_sums.layers.items())
    )


def _gradient_by_sums(loss_sums_of: Callable[[Array, Batch], LossSums], spec: ModelSpec, batch: Batch) -> Sums | None:
    """The derivative of the layers' part of the summed loss by their sums over all micro-batches; None where the layers
    have no such part."""
    if jax.eval_shape(lambda: layers_loss(spec, no_sums(spec.stacks))) is None:
        return None

    def add(total: tuple[Sums, Array], x: tuple[Array, Batch]) -> tuple[tuple[Sums, Array], None]:
        loss_sums = loss_sums_of(*x)
        return jax.tree.map(jnp.add, total, (dict(loss_sums.layers), loss_sums.weight)), None

    indices = jnp.arange(batch["tokens"].shape[0])
    (sums, weight), _ = lax.scan(add, (no_sums(spec.stacks), jnp.zeros(())), (indices, batch))

    def loss(sums: Sums) -> Array:
        added = layers_loss(spec, sums)
        assert added is not None
        return added * weight

    return jax.lax.stop_gradient(jax.grad(loss)(sums))


class Step(Protocol):
    """One update, not yet compiled."""

    def __call__(
        self, state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]
    ) -> tuple[TrainState, Metrics]: ...


class SummedStep(Protocol):
    """An update that also returns the sums of the layers over all its micro-batches."""

    def __call__(
        self, state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""], /
    ) -> tuple[TrainState, Metrics, Sums]: ...


def _with_next_scale(state: TrainState, after: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """(the state after an update from `state`, with the next loss scale; its metrics)."""
    scale = next_loss_scale(state.loss_scale, metrics["finite"])
    metrics = metrics | {"loss_scale": scale["scale"], "skipped_updates": scale["skipped"]}
    # The batch of an update that is skipped is used up.
    return dataclasses.replace(after, step=state.step + 1, loss_scale=scale), metrics


def with_buffers(spec: ModelSpec, step: SummedStep) -> Step:
    """The step of a state with buffers, frozen in its forward and backward passes, and with a scale of the loss.

    Both are adjusted after its update."""

    def adjusted(state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        buffers = state.buffers
        state = dataclasses.replace(state, buffers={})
        after, metrics, sums = step(state, merge(frozen, buffers), batch, seed)
        if state.loss_scale:
            after, metrics = _with_next_scale(state, after, metrics)
        if buffers:
            new = adjust_buffers(spec, buffers, sums)
            buffers = jax.tree.map(lambda new, old: jnp.where(metrics["finite"], new, old), new, buffers)
        return dataclasses.replace(after, buffers=buffers), metrics

    return adjusted


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
    clipping), finite (bool) and finite_micro (bool [A]). Where anything is not finite the state is returned
    unchanged: the update is not applied. With `compute.layout`, `abstract` are the trainable leaves' ArraySpecs,
    `buffers` those of the state's buffers: state and gradients lie as these say, the batch as
    `mesh.placement.place_batch` puts it, and metrics are on every device.
    """
    layout = compute.layout
    assert layout is None or abstract is not None, "a layout needs the logical axes of what is trained"
    assert compute.remat != "none" or "residual" not in compute.offload, "remat none keeps more than the residual"
    options = {} if compute.dtype == "float32" else compiler_options(compute.platform) or {}
    if optimizer.in_backward:
        if compute.dtype == FLOAT16:
            raise UserError(
                "an update in the backward pass consumes the gradients of the last layers before those of the first "
                "can overflow in float16, and a skipped update must change nothing",
                where="optimizer.in_backward, compute.precision",
                fix="set optimizer.in_backward=false (optimizer.name=adamw8bit or galore also takes less memory), or "
                "compute.precision=float32",
            )
        assert max_grad_norm is None, "the norm of all gradients is not known before the first is consumed"
        step = layerwise_step(objective, spec, compute, optimizer, abstract, dropout)
        options = {**options, **streaming_options(compute)}
    else:
        step = _accumulated_step(objective, spec, compute, optimizer, abstract, max_grad_norm, dropout)
    step = with_buffers(spec, step)
    if layout is None or abstract is None:
        return jax.jit(step, donate_argnums=0, compiler_options=options or None)
    like = abstract_state(abstract, optimizer, layout, compute.offload, buffers, compute.dtype)
    out = jax.tree.map(lambda leaf: leaf.sharding, like), layout.replicated
    return jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=options or None)


def make_eval_step(objective: Objective, spec: ModelSpec, compute: Compute) -> Callable[[Tree, Tree, Batch], LossSums]:
    """A jitted step(trainable, frozen, batch of [B, T] arrays) -> LossSums, without dropout and without the loss of
    its layers' sums (objectives.answers.with_layers): that is a function of the sums over all batches."""

    def step(trainable: Tree, frozen: Tree, batch: Batch) -> LossSums:
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
        scale = state.loss_scale.get("scale")
        gradient, norm, finite, metrics, sums = mean_gradient(
            objective, spec, compute, trained, params, batch, rng, placed, scale
        )
        if max_grad_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ does it, the 1e-6 included.
            shrink = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            gradient = jax.tree.map(lambda g: g * shrink, gradient)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, trained)
        if optimizer.blocks is not None or is_any_offloaded(state.opt_state):
            return _update_parts(optimizer, gradient, state, finite), metrics, sums
        extra = {"curvature": lambda: hessian(state, params, batch, seed)} if optimizer.needs_hessian else {}
        return _update_state(optimizer, gradient, state, finite, **extra), metrics, sums

    def hessian(state: TrainState, params: Callable[[Tree], Tree], batch: Batch, seed: Int[Array, ""]) -> Tree:
        """The curvature along the trained parameters, from the first micro-batch."""
        first, key = jax.tree.map(lambda x: x[0], batch), jax.random.fold_in(jax.random.key(seed), state.step)
        return placed(curvature(state.trainable, params, spec, compute, first, key))

    return step


def _placement(compute: Compute, optimizer: Optimizer, abstract: Tree | None) -> Callable[[Tree], Tree]:
    """Lays a gradient out as its parameters are: summed over the devices' rows and split in one go."""
    layout = compute.layout
    if layout is None or abstract is None:
        return lambda gradient: gradient
    arrays = abstract if optimizer.blocks is None else optimizer.blocks.layer
    shardings = jax.tree.map(layout.of, arrays)
    return lambda gradient: jax.tree.map(lax.with_sharding_constraint, gradient, shardings)


def _update_parts(optimizer: Optimizer, gradient: Tree, state: TrainState, finite: Array) -> TrainState:
    """`_update_state` of the active layer, or by rows of arrays that are in the host's memory."""
    update = (lambda *args: updated_by_rows(optimizer, *args)) if optimizer.blocks is None else optimizer.blocks.update
    trainable, opt_state = update(gradient, state.opt_state, state.trainable, finite)
    return TrainState(jnp.where(finite, state.step + 1, state.step), trainable, opt_state)


def _update_state(optimizer: Optimizer, gradient: Tree, state: TrainState, finite: Array, **extra: Any) -> TrainState:
    """The state after the update where `finite` says so, else unchanged. `extra` are arguments of the update."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.trainable, **extra)
    trainable = add_updates(state.trainable, updates, state.step, optimizer.stacked, optimizer.rounding)
    new = TrainState(state.step + 1, trainable, opt_state, loss_scale=state.loss_scale)
    return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
