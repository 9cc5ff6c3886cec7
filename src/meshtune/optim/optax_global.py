"""Optimizers from optax transformations that need the gradients of all parameters at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import KeyPath, Tree, named_leaves, path_name
from meshtune.optim.optimizer import Optimizer, Schedule, State, state_spec, to_float32


def from_optax_global(
    transformation: optax.GradientTransformation, schedule: Schedule, dtype: str | None = None
) -> Optimizer:
    """An optimizer from an optax transformation that needs all gradients, and whose updates are the changes themselves.

    It computes in float32, and stores state in a parameter's shape in `dtype` or the parameter's own.
    """

    def specs(abstract: Tree) -> State:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), abstract)
        return _specs_like_parameters(jax.eval_shape(transformation.init, shapes), abstract, dtype)

    def init(tree: Tree) -> State:
        dtypes = specs(jax.tree.map(_replicated_spec, tree))
        state = transformation.init(jax.tree.map(to_float32, tree))
        # A copy: state that starts as a parameter must not share its buffer, which the train step donates.
        return jax.tree.map(lambda leaf, like: jnp.array(leaf, like.dtype, copy=True), state, dtypes)

    def update(gradients: Tree, state: State, tree: Tree, **extra: Any) -> tuple[Tree, State]:
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
        wide = jax.tree.map(to_float32, (gradients, state, tree))
        changes, new = transformation.update(*wide, **extra)
        return changes, jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), new, dtypes)  # pyright: ignore[reportReturnType]

    return Optimizer(init, update, specs, schedule)


def _specs_like_parameters(state: State, abstract: Tree, dtype: str | None = None) -> State:
    """The ArraySpecs of a state from its shapes: the path of a parameter's state contains the parameter's path.

    State in the parameter's shape is sharded like it; the rest (counts, statistics of rows or columns) is replicated.
    """
    parameters = [(f"/{name}/", array) for name, array in named_leaves(abstract)]
    no_parameter = ArraySpec((-1,), "float32", ("whole",))

    def spec(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> ArraySpec:
        name = f"/{path_name(path)}/"
        owner = next((a for owned, a in parameters if owned in name and a.shape == leaf.shape), no_parameter)
        return state_spec(leaf, owner, dtype or str(leaf.dtype))

    return jax.tree_util.tree_map_with_path(spec, state)


def _replicated_spec(leaf: Array) -> ArraySpec:
    return ArraySpec(tuple(leaf.shape), str(leaf.dtype), ("whole",) * len(leaf.shape))
