"""The state that a train step changes: trained parameters and the optimizer's state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, merge
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import concrete_sharding, is_offloaded, offload_abstract
from meshtune.objectives.answers import without_critic
from meshtune.optim.optimizer import Optimizer, State
from meshtune.train.step.loss_scale import abstract_loss_scale, initial_loss_scale

Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The number of updates so far, the trained leaves, the optimizer's state, the buffers that each update adjusts
    without a gradient (model.buffers), and the scale of the loss where products are float16 (loss_scale.FORMS)."""

    step: Int[Array, ""]
    trainable: Tree
    opt_state: State
    buffers: Tree = dataclasses.field(default_factory=dict)
    loss_scale: Tree = dataclasses.field(default_factory=dict)


def abstract_state(
    abstract: Tree,
    optimizer: Optimizer,
    layout: Layout | None = None,
    offload: Collection[str] = (),
    buffers: Tree | None = None,
    dtype: str = "float32",
) -> TrainState:
    """The state of trainable ArraySpecs and `buffers`, as ShapeDtypeStructs; with a layout, each with its sharding.

    `dtype` is that of activations.

    With "optimizer" in `offload` the optimizer's state lies in the host's memory; with "weights", and an optimizer that
    updates layer by layer, the trained weights do.
    """
    count, scale = ArraySpec((), "int32", ()), abstract_loss_scale(dtype)
    state = TrainState(count, abstract, optimizer.specs(abstract), buffers or {}, scale)  # pyright: ignore[reportArgumentType]

    def shape_of(array: ArraySpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=None if layout is None else layout.of(array))

    like = jax.tree.map(shape_of, state)
    if "weights" in offload and optimizer.in_backward:
        like = dataclasses.replace(like, trainable=offload_abstract(like.trainable))
    if "optimizer" in offload:
        like = dataclasses.replace(like, opt_state=offload_abstract(like.opt_state))
    return like


def result_params(optimizer: Optimizer, state: TrainState) -> Tree:
    """The parameters that a run evaluates, samples from and exports: buffers among them, a critic not."""
    return merge(without_critic(optimizer.evaluation_params(state.trainable, state.opt_state)), state.buffers)


def init_state(
    trainable: Tree,
    optimizer: Optimizer,
    like: TrainState | None = None,
    buffers: Tree | None = None,
    dtype: str = "float32",
) -> TrainState:
    """The state before the first update with activations in `dtype`; the optimizer's state lies as in `like`, an
    `abstract_state`."""
    init = optimizer.init
    if like is not None and any(is_offloaded(leaf.sharding) for leaf in jax.tree.leaves(like.opt_state)):
        init = functools.partial(_init_by_leaf, init, like=like.opt_state)
    elif like is not None:
        init = jax.jit(init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like.opt_state))
    zero = np.zeros((), np.int32)
    step = jnp.asarray(zero) if like is None else jax.device_put(zero, like.step.sharding)
    scale = jax.tree.map(jnp.asarray, initial_loss_scale(dtype))
    if like is not None:
        scale = jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), scale, like.loss_scale)
    return TrainState(step, trainable, init(trainable), buffers or {}, scale)


def _init_by_leaf(init: Callable[[Tree], State], trainable: Tree, like: State) -> State:
    """An optimizer's first state, leaf by leaf: the device may not have room for all that the host has."""
    leaves, structure = jax.tree.flatten(like)

    def leaf(index: int) -> Array:
        sharding = concrete_sharding(leaves[index].sharding)
        return jax.jit(lambda tree: jax.tree.leaves(init(tree))[index], out_shardings=sharding)(trainable)

    return jax.tree.unflatten(structure, [leaf(index).block_until_ready() for index in range(len(leaves))])
