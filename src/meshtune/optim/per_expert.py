"""Optimizers of matrices applied to arrays of experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.optimizer import ParamOptimizer, State, UpdateContext


def per_expert(matrix: ParamOptimizer) -> ParamOptimizer:
    """An optimizer of matrices applied to every expert of an array [experts, out, in] separately.

    Each expert has separate statistics, norms and random keys, as if the experts were layers of a stack.
    """

    def specs(parameter: ArraySpec) -> State:
        count, axis = parameter.shape[0], parameter.axes[0]
        expert = dataclasses.replace(parameter, shape=parameter.shape[1:], axes=parameter.axes[1:])
        return jax.tree.map(
            lambda leaf: dataclasses.replace(leaf, shape=(count, *leaf.shape), axes=(axis, *leaf.axes)),
            matrix.specs(expert),
        )

    def update(gradient: Array, state: State, parameter: Array, context: UpdateContext) -> tuple[Array, State]:
        count = gradient.shape[0]

        def expert(gradient: Array, state: State, parameter: Array, index: Array) -> tuple[Array, State]:
            layer = context.layer * count + index
            return matrix.update(gradient, state, parameter, dataclasses.replace(context, layer=layer))

        arrays = (gradient, state, parameter, jnp.arange(count))
        return lax.map(lambda arrays: expert(*arrays), arrays) if matrix.sequential else jax.vmap(expert)(*arrays)

    init = None if matrix.init is None else jax.vmap(matrix.init)
    return ParamOptimizer(specs, update, init, matrix.sequential, matrix.by_rows)
