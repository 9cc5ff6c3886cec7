"""How one parameter of one layer is updated: the form of every optimizer that looks at one parameter at a time.

Stacked layers are no part of a rule: it sees a matrix [out, in] or a vector. What applies it to whole trees, layer by
layer, is `by_parameter`; a fused step applies it to a layer as soon as the backward pass has made its gradient.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import Array, Float, Int, Key

from meshtune.arrays.spec import ArraySpec

State = Any  # a tree of arrays, or of their ArraySpecs


@dataclasses.dataclass(frozen=True)
class At:
    """Which update of which parameter.

    `layer` is the parameter's row in its stack (0 where it is in none), `count` the updates made before, `rate` the
    learning rate, `decay` the weight decay of this parameter.
    """

    path: str
    layer: Int[Array, ""]
    count: Int[Array, ""]
    rate: Float[Array, ""]
    decay: float

    def key(self, seed: int, period: Array) -> Key[Array, ""]:
        """A source of random numbers of this parameter of this layer, another one for every period."""
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(self.path.encode()))
        return jax.random.fold_in(jax.random.fold_in(key, self.layer), period)


# (gradient, state, parameter, at) -> (what is added to the parameter, the next state); floating numbers in float32
Update = Callable[[Array, State, Array, At], tuple[Array, State]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """`specs(parameter)` says what is kept of a parameter of one layer, with logical axes, from its ArraySpec.

    The state begins as these say (zeros or ones), or as `init(parameter)`. `sequential` rules need several times a
    parameter's memory while they work: the layers of a stack take turns. `by_rows`: some rows of a matrix are updated
    from those rows of gradient and state alone, all of which have the matrix's rows.
    """

    specs: Callable[[ArraySpec], State]
    update: Update
    init: Callable[[Array], State] | None = None
    sequential: bool = False
    by_rows: bool = False


# Which rule a parameter has: (path, the ArraySpec of one layer's) -> Rule
Rules = Callable[[str, ArraySpec], Rule]


def kept(parameter: ArraySpec, dtype: str | None = None) -> ArraySpec:
    """Zeros in a parameter's shape that lie as it does, in `dtype` or its own."""
    return dataclasses.replace(parameter, dtype=dtype or parameter.dtype, init="zeros")


def descent(at: At, direction: Array, parameter: Array) -> Array:
    """The change along a direction, with decoupled decay."""
    return -at.rate * (direction + at.decay * parameter if at.decay else direction)


def adopted(
    make: Callable[[At], optax.GradientTransformation], dtype: str | None = None, *, final: bool = False
) -> Rule:
    """A rule from a transformation of optax that treats every parameter alike.

    `make(at)` is called anew for every parameter. Its updates are directions to descend along or, if `final`, the
    changes themselves, with rate and decay of `at` in them. What it keeps in the parameter's shape lies as that does.
    """
    nowhere = At("", jax.numpy.zeros((), "int32"), jax.numpy.zeros((), "int32"), jax.numpy.zeros(()), 0.0)

    def init(parameter: Array) -> State:
        return jax.tree.map(jax.numpy.copy, make(nowhere).init(parameter))

    def specs(parameter: ArraySpec) -> State:
        shapes = jax.eval_shape(init, jax.ShapeDtypeStruct(parameter.shape, "float32"))
        return jax.tree.map(lambda leaf: like(leaf, parameter, dtype), shapes)

    def update(gradient: Array, state: State, parameter: Array, at: At) -> tuple[Array, State]:
        result, state = make(at).update(gradient, state, parameter)
        assert isinstance(result, jax.Array)
        return result if final else descent(at, result, parameter), state

    return Rule(specs, update, init)


def like(leaf: Any, parameter: ArraySpec, dtype: str | None = None) -> ArraySpec:
    """The ArraySpec of something kept of a parameter: in its shape it lies as it does, else it is on every device."""
    floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    kind = str(leaf.dtype) if not floating or leaf.shape != parameter.shape else dtype or parameter.dtype
    axes = parameter.axes if leaf.shape == parameter.shape else ("whole",) * len(leaf.shape)
    return ArraySpec(tuple(leaf.shape), kind, axes, "zeros")
