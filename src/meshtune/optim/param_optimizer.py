"""How one parameter of one layer is updated: the form of every optimizer that treats parameters independently.

A ParamOptimizer never sees the layers of a stack: it updates a matrix [out, in] or a vector. `optimizer.by_parameter`
applies it to whole trees, layer by layer; an update during the backward pass applies it to a layer as soon as its
gradient is known.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from meshtune.arrays.spec import ArraySpec

# Keys of an optimizer's state, also in checkpoints: updates made, and the state of every parameter by path.
COUNT, PARAM_STATE = "count", "kept"

State = Any  # a pytree of arrays, or of their ArraySpecs; its structure is the optimizer's own


@dataclasses.dataclass(frozen=True)
class UpdateContext:
    """Which update of which parameter.

    `layer` is the parameter's index in its stack (0 outside of stacks), `count` the number of updates made before,
    `rate` the learning rate, `decay` the weight decay of this parameter.
    """

    path: str
    layer: Int[Array, ""]
    count: Int[Array, ""]
    rate: Float[Array, ""]
    decay: float

    def key(self, seed: int, period: Array) -> Key[Array, ""]:
        """The random key of this parameter of this layer in a period; another period has another key."""
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(self.path.encode()))
        return jax.random.fold_in(jax.random.fold_in(key, self.layer), period)


# (gradient, state, parameter, context) -> (what is added to the parameter, the next state), all floats in float32
Update = Callable[[Array, State, Array, UpdateContext], tuple[Array, State]]


@dataclasses.dataclass(frozen=True)
class ParamOptimizer:
    """The state and the update of one parameter.

    `specs(parameter)` describes the state of one layer's parameter, with logical axes. The state starts as its specs
    say (zeros or ones), or as `init(parameter)`. With `sequential` the layers of a stack are updated one after another,
    because an update temporarily needs several times a parameter's memory. With `by_rows` some rows of a matrix can be
    updated from the same rows of gradient and state, all of which have as many rows as the matrix.
    """

    specs: Callable[[ArraySpec], State]
    update: Update
    init: Callable[[Array], State] | None = None
    sequential: bool = False
    by_rows: bool = False


# (path, the ArraySpec of one layer's parameter) -> its optimizer. The path is for error messages alone.
ChooseByRole = Callable[[str, ArraySpec], ParamOptimizer]


def state_like(parameter: ArraySpec, dtype: str | None = None) -> ArraySpec:
    """Zeros in a parameter's shape, sharded like it, in `dtype` or the parameter's own."""
    return dataclasses.replace(parameter, dtype=dtype or parameter.dtype, init="zeros", role="state")


def apply_decay(context: UpdateContext, direction: Array, parameter: Array) -> Array:
    """The change along a descent direction at the learning rate, with decoupled weight decay."""
    return -context.rate * (direction + context.decay * parameter if context.decay else direction)


def from_optax(
    make: Callable[[UpdateContext], optax.GradientTransformation], dtype: str | None = None, *, final: bool = False
) -> ParamOptimizer:
    """A ParamOptimizer from an optax transformation.

    `make(context)` is called for every parameter. Its updates are directions to descend along or, if `final`, the
    changes themselves, with the context's learning rate and decay applied. State in the parameter's shape is sharded
    like the parameter and stored in `dtype`.
    """
    empty = UpdateContext("", jnp.zeros((), "int32"), jnp.zeros((), "int32"), jnp.zeros(()), 0.0)

    def init(parameter: Array) -> State:
        return jax.tree.map(jnp.copy, make(empty).init(parameter))

    def specs(parameter: ArraySpec) -> State:
        shapes = jax.eval_shape(init, jax.ShapeDtypeStruct(parameter.shape, "float32"))
        return jax.tree.map(lambda leaf: state_spec(leaf, parameter, dtype), shapes)

    def update(gradient: Array, state: State, parameter: Array, context: UpdateContext) -> tuple[Array, State]:
        result, state = make(context).update(gradient, state, parameter)
        assert isinstance(result, jax.Array)
        return result if final else apply_decay(context, result, parameter), state

    return ParamOptimizer(specs, update, init)


def state_spec(leaf: jax.ShapeDtypeStruct, parameter: ArraySpec, dtype: str | None = None) -> ArraySpec:
    """ArraySpec of an optimizer-state array: sharded like its parameter if shapes match, otherwise replicated."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    name = str(leaf.dtype) if not floating or leaf.shape != parameter.shape else dtype or parameter.dtype
    axes = parameter.axes if leaf.shape == parameter.shape else ("whole",) * len(leaf.shape)
    return ArraySpec(tuple(leaf.shape), name, axes, "zeros")
