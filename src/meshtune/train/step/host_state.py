"""Optimizer updates of state that is kept in the host's memory, fetched to the device one layer at a time.

The type of an array names its memory. Each row of a stack is written back before the next is fetched, so that a device
holds the state of one layer of one parameter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshtune.arrays.tree import Tree, named_leaves
from meshtune.mesh.layout import Layout
from meshtune.model.gather import is_any_offloaded, is_offloaded, to_device
from meshtune.optim.optimizer import COUNT, PARAM_STATE, Optimizer, State

HOST = jax.memory.Space.Host
PIECE = 2**26  # bytes of float32 numbers of an offloaded matrix that are updated at once


def updated_by_rows(
    optimizer: Optimizer, gradients: Tree, state: State, trainable: Tree, apply: Array
) -> tuple[Tree, State]:
    """(trainable leaves, optimizer state) after the update where `apply` (bool) is true, and unchanged elsewhere.

    Arrays stay in the memory they were given in. The optimizer must update every parameter separately
    (`Optimizer.update_param`).
    """
    assert optimizer.update_param is not None, "an update that needs all gradients cannot take rows one by one"
    update, count = optimizer.update_param, state[COUNT]

    def update_layer(path: str, gradient: Array, state: State, parameter: Array, layer: Array) -> tuple[Array, State]:
        before = to_device(state)
        new, after = update(path, gradient, before, parameter, count, layer)
        after = jax.tree.map(
            lambda new, old, like: _to_memory_of(like, jnp.where(apply, new, old)), after, before, state
        )
        return jnp.where(apply, new, parameter), after

    def update_stack(path: str, gradient: Array, state: State, parameter: Array) -> tuple[Array, State]:
        def row(index: Array, running: tuple[Array, State]) -> tuple[Array, State]:
            parameter, state = jax.tree.map(lambda leaf: _row(leaf, index), running)
            updated = update_layer(path, _row(gradient, index), state, parameter, index)
            return jax.tree.map(lambda leaf, new: _with_row(leaf, new, index), running, updated)

        return lax.fori_loop(0, parameter.shape[0], row, (parameter, state))

    parameters, states = [], {}
    for (path, gradient), parameter in zip(named_leaves(gradients), jax.tree.leaves(trainable), strict=True):
        before = state[PARAM_STATE][path]
        if path in optimizer.stacked:
            parameter, states[path] = update_stack(path, gradient, before, parameter)
        else:
            parameter, states[path] = update_layer(path, gradient, before, parameter, jnp.int32(0))
        parameters.append(parameter)
    opt_state = {COUNT: jnp.where(apply, count + 1, count), PARAM_STATE: states}
    return jax.tree.unflatten(jax.tree.structure(trainable), parameters), opt_state


def updated_at_once(
    optimizer: Optimizer,
    path: str,
    gradient: Array,
    state: State,
    parameter: Array,
    count: Array,
    apply: Array,
    layout: Layout | None = None,
) -> tuple[Array, State]:
    """(parameter, state) of an array outside the stacks of layers, after the update where `apply` (bool) is true.

    Arrays stay in the memory they were given in; the gradient is on the device. Of an offloaded matrix, an embedding or
    an output head, some rows are fetched at a time where its optimizer allows that.
    """
    update_param = optimizer.update_param
    assert update_param is not None, "an update that needs all gradients cannot take parameters one by one"

    def update(gradient: Array, state: State, parameter: Array) -> tuple[Array, State]:
        old_parameter, old_state = before = to_device((parameter, state))
        after = update_param(path, gradient, old_state, old_parameter, count, jnp.int32(0))
        return jax.tree.map(
            lambda new, old, like: _to_memory_of(like, jnp.where(apply, new, old)), after, before, (parameter, state)
        )

    separable = path in optimizer.row_separable and parameter.ndim >= 2 and layout is None
    if not separable or not is_any_offloaded((parameter, state)):
        return update(gradient, state, parameter)
    rows, width = parameter.shape[0], parameter.size // parameter.shape[0]
    size = max(1, min(rows, PIECE // (4 * width)))

    def update_piece(start: Array, size: int, running: tuple[Array, State]) -> tuple[Array, State]:
        parameter, state = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), running)
        updated = update(lax.dynamic_slice_in_dim(gradient, start, size), state, parameter)
        return jax.tree.map(lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, start, 0), running, updated)

    running = lax.fori_loop(
        0, rows // size, lambda index, running: update_piece(index * size, size, running), (parameter, state)
    )
    left = rows % size
    return update_piece(jnp.int32(rows - left), left, running) if left else running


def _row(leaf: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _with_row(leaf: Array, new: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(leaf, new, index, 0)


def _to_memory_of(like: Array, leaf: Array) -> Array:
    return jax.device_put(leaf, HOST) if is_offloaded(like) else leaf
