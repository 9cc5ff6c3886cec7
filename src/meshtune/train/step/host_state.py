"""An optimizer's update of state that waits in the host's memory: brought to the device a layer at a time.

What is there says so itself: an array's type names its memory. Each row of a stack is written back in its place before
the next is brought, so that a device holds the state of one layer of one parameter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshtune.arrays.paths import named_leaves
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout
from meshtune.model.in_use import here, on_host
from meshtune.optim.optimizer import Optimizer
from meshtune.optim.param_optimizer import COUNT, PARAM_STATE

HOST = jax.memory.Space.Host
PIECE = 2**26  # bytes of float32 numbers of a matrix in the host's memory that are updated at once


def any_on_host(tree: Any) -> bool:
    return any(on_host(leaf) for leaf in jax.tree.leaves(tree))


def updated_by_rows(
    optimizer: Optimizer, gradients: Tree, state: Any, trainable: Tree, apply: Array
) -> tuple[Tree, Any]:
    """(trainable leaves, optimizer state) after the update where `apply` (bool) says so, else as they came.

    What came in the host's memory is returned in the host's memory. The optimizer must be one that treats every
    parameter by itself (`Optimizer.update_param`).
    """
    assert optimizer.update_param is not None, "an update that needs all gradients cannot take rows in turn"
    update, count = optimizer.update_param, state[COUNT]

    def one(path: str, gradient: Array, kept: Any, parameter: Array, layer: Array) -> tuple[Array, Any]:
        was = here(kept)
        new, after = update(path, gradient, was, parameter, count, layer)
        after = jax.tree.map(lambda made, was, like: _back(jnp.where(apply, made, was), like), after, was, kept)
        return jnp.where(apply, new, parameter), after

    def by_rows(path: str, gradient: Array, kept: Any, parameter: Array) -> tuple[Array, Any]:
        def row(number: Array, running: tuple[Array, Any]) -> tuple[Array, Any]:
            parameter, kept = jax.tree.map(lambda leaf: _row(leaf, number), running)
            made = one(path, _row(gradient, number), kept, parameter, number)
            return jax.tree.map(lambda leaf, new: _put(leaf, new, number), running, made)

        return lax.fori_loop(0, parameter.shape[0], row, (parameter, kept))

    parameters, states = [], {}
    for (path, gradient), parameter in zip(named_leaves(gradients), jax.tree.leaves(trainable), strict=True):
        if path in optimizer.stacked:
            parameter, states[path] = by_rows(path, gradient, state[PARAM_STATE][path], parameter)
        else:
            parameter, states[path] = one(path, gradient, state[PARAM_STATE][path], parameter, jnp.int32(0))
        parameters.append(parameter)
    made = {COUNT: jnp.where(apply, count + 1, count), PARAM_STATE: states}
    return jax.tree.unflatten(jax.tree.structure(trainable), parameters), made


def updated_at_once(
    optimizer: Optimizer,
    path: str,
    gradient: Array,
    kept: Any,
    parameter: Array,
    count: Array,
    apply: Array,
    layout: Layout | None = None,
) -> tuple[Array, Any]:
    """(parameter, state) of what is in no stack of layers, after the update where `apply` (bool) says so.

    What came in the host's memory is returned there. A matrix that waits there, an embedding or an output head, is
    brought some rows at a time where its rule allows that; the gradient is on the device.
    """
    one = optimizer.update_param
    assert one is not None, "an update that needs all gradients cannot take parameters in turn"

    def some(gradient: Array, kept: Any, parameter: Array) -> tuple[Array, Any]:
        was = here((parameter, kept))
        new, after = one(path, gradient, was[1], was[0], count, jnp.int32(0))
        return jax.tree.map(
            lambda made, was, like: _back(jnp.where(apply, made, was), like), (new, after), was, (parameter, kept)
        )

    if (
        not any_on_host((parameter, kept))
        or path not in optimizer.row_separable
        or parameter.ndim < 2
        or layout is not None
    ):
        return some(gradient, kept, parameter)
    rows, width = parameter.shape[0], parameter.size // parameter.shape[0]
    size = max(1, min(rows, PIECE // (4 * width)))

    def piece(start: Array, size: int, running: tuple[Array, Any]) -> tuple[Array, Any]:
        parameter, kept = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), running)
        made = some(lax.dynamic_slice_in_dim(gradient, start, size), kept, parameter)
        return jax.tree.map(lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, start, 0), running, made)

    running = lax.fori_loop(
        0, rows // size, lambda number, running: piece(number * size, size, running), (parameter, kept)
    )
    left = rows % size
    return piece(jnp.int32(rows - left), left, running) if left else running


def _row(leaf: Array, number: Array) -> Array:
    return lax.dynamic_index_in_dim(leaf, number, keepdims=False)


def _put(leaf: Array, new: Array, number: Array) -> Array:
    return lax.dynamic_update_index_in_dim(leaf, new, number, 0)


def _back(leaf: Array, like: Array) -> Array:
    return jax.device_put(leaf, HOST) if on_host(like) else leaf
