"""Optimizers of whole trees, in the form of optax: from rules of single parameters, or from optax's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from meshtune.arrays.paths import named_leaves, path_name
from meshtune.arrays.spec import ArraySpec
from meshtune.model.in_use import here
from meshtune.optim.rule import At, Rule, State, like
from meshtune.optim.schedules import Schedule

if TYPE_CHECKING:
    from meshtune.optim.badam import Blocks

Tree = Any
LAYERS = "layers/"  # where paths of stacked parameters begin
COUNT, KEPT = "count", "kept"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What a train step needs of an optimizer; `init` and `update` as optax has them, updates to be added.

    `specs(abstract)` is the state of a tree of ArraySpecs as ArraySpecs of the same structure: initialisation, layout
    and estimates of memory read it. `shown(trainable, state)` are the parameters to evaluate and to export.
    `one(path, gradient, state, parameter, count, layer)` is the update of one parameter of one layer, (parameter,
    state): None where an update needs the gradients of all. `schedule` gives the learning rate of an update.
    Of the paths in `separable`, `one` may be given some rows of a matrix. A `fused` one updates a layer as soon as the
    backward pass has its gradient (train.fused); with `blocks` the layers take turns (optim.badam); the update of a
    `curved` one is also given `curvature`, a function () -> the curvature of the loss along each parameter.
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    specs: Callable[[Tree], State]
    schedule: Schedule
    shown: Callable[[Tree, State], Tree] = lambda trainable, state: trainable
    one: Callable[..., tuple[Array, State]] | None = None
    separable: frozenset[str] = frozenset()
    fused: bool = False
    blocks: Blocks | None = None
    curved: bool = False

    def gradients(self, abstract: Tree) -> dict[str, ArraySpec]:
        """The gradients that exist at once, float32, by path."""
        every = {path: dataclasses.replace(leaf, dtype="float32") for path, leaf in named_leaves(abstract)}
        if not self.fused and self.blocks is None:
            return every
        outside = {path: leaf for path, leaf in every.items() if not path.startswith(LAYERS)}
        return ({} if self.blocks else outside) | _one_layer(every)


def by_parameter(
    rules: dict[str, Rule], schedule: Schedule, decay: dict[str, float], factors: dict[str, float] | None = None
) -> Optimizer:
    """An optimizer that treats every parameter of every layer by itself, by the rule and the decay of its path, and
    with the schedule's rate times the factor of its path, if there are any.

    Arithmetic is in float32 whatever parameters and state are kept in. State: the number of updates made, and for every
    path what its rule keeps, stacked as the parameter is.
    """

    def one(path: str, gradient: Array, state: State, parameter: Array, count: Array, layer: Array):
        change, state = _change(path, gradient, state, parameter, count, layer)
        return (parameter + change).astype(parameter.dtype), state

    def _change(path: str, gradient: Array, state: State, parameter: Array, count: Array, layer: Array):
        rate = schedule(count) if factors is None else schedule(count) * factors[path]
        at = At(path, layer, count, rate, decay[path])
        kinds = jax.tree.map(lambda leaf: leaf.dtype, state)
        wide = jax.tree.map(_wide, state)
        change, new = rules[path].update(_wide(gradient), wide, _wide(parameter), at)
        return change, jax.tree.map(lambda leaf, kind: leaf.astype(kind), new, kinds)

    def specs(abstract: Tree) -> State:
        made = {
            path: stacked(path, leaf, rules[path].specs(single(path, leaf))) for path, leaf in named_leaves(abstract)
        }
        return {COUNT: ArraySpec((), "int32", (), "zeros"), KEPT: made}

    def init(tree: Tree) -> State:
        abstract = jax.tree.map(as_spec, tree)
        state = jax.tree.map(_begun, specs(abstract))
        for path, leaf in named_leaves(tree):
            begin = rules[path].init
            if begin is not None:
                kinds = jax.tree.map(lambda kept: kept.dtype, state[KEPT][path])
                made = (jax.vmap(begin) if path.startswith(LAYERS) else begin)(_wide(here(leaf)))
                state[KEPT][path] = jax.tree.map(lambda new, kind: new.astype(kind), made, kinds)
        return state

    def update(gradients: Tree, state: State, tree: Tree) -> tuple[Tree, State]:
        count, changes, states = state[COUNT], [], {}
        for (path, gradient), parameter in zip(named_leaves(gradients), jax.tree.leaves(tree), strict=True):
            mine = state[KEPT][path]
            if not path.startswith(LAYERS):
                change, mine = _change(path, gradient, mine, parameter, count, jnp.int32(0))
            elif rules[path].sequential:
                change, mine = in_turn(
                    lambda g, s, p, layer, path=path: _change(path, g, s, p, count, layer), gradient, mine, parameter
                )
            else:
                every = jax.vmap(lambda g, s, p, layer, path=path: _change(path, g, s, p, count, layer))
                change, mine = every(gradient, mine, parameter, jnp.arange(parameter.shape[0]))
            changes.append(change)
            states[path] = mine
        return jax.tree.unflatten(jax.tree.structure(gradients), changes), {COUNT: count + 1, KEPT: states}

    separable = frozenset(path for path, rule in rules.items() if rule.by_rows)
    return Optimizer(init, update, specs, schedule, one=one, separable=separable)


def in_turn(change: Callable[..., tuple[Array, State]], gradient: Array, state: State, parameter: Array):
    """Layer after layer, in the place of gradient and state: what a rule makes on its way exists for one layer."""

    def layer(number: Array, running: tuple[Array, State]) -> tuple[Array, State]:
        changes, states = running
        here = jax.tree.map(lambda leaf: leaf[number], (changes, states, parameter))
        made = change(*here, number)
        return jax.tree.map(lambda whole, new: whole.at[number].set(new.astype(whole.dtype)), running, made)

    return lax.fori_loop(0, parameter.shape[0], layer, (_wide(gradient), state))


def whole(transformation: optax.GradientTransformation, schedule: Schedule, dtype: str | None = None) -> Optimizer:
    """An optimizer from a transformation of optax whose updates need all gradients, and are the changes themselves.

    It computes in float32, and keeps what has a parameter's shape in `dtype` or the parameter's own.
    """

    def specs(abstract: Tree) -> State:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), abstract)
        return like_parameters(jax.eval_shape(transformation.init, shapes), abstract, dtype)

    def init(tree: Tree) -> State:
        kinds = specs(jax.tree.map(as_spec, tree))
        state = transformation.init(jax.tree.map(_wide, tree))
        # A copy: what is kept of a parameter's start must not be the parameter, which is given up.
        return jax.tree.map(lambda leaf, kind: jnp.array(leaf, kind.dtype, copy=True), state, kinds)

    def update(gradients: Tree, state: State, tree: Tree, **seen: Any) -> tuple[Tree, State]:
        kinds = jax.tree.map(lambda leaf: leaf.dtype, state)
        wide = jax.tree.map(_wide, (gradients, state, tree))
        changes, new = transformation.update(*wide, **seen)
        return changes, jax.tree.map(lambda leaf, kind: leaf.astype(kind), new, kinds)

    return Optimizer(init, update, specs, schedule)


def state_specs(optimizer: Any, abstract: Tree) -> State:
    """The state of an Optimizer, or of any transformation of optax, as ArraySpecs."""
    if isinstance(optimizer, Optimizer):
        return optimizer.specs(abstract)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
    return like_parameters(jax.eval_shape(optimizer.init, shapes), abstract)


def like_parameters(state: Any, abstract: Tree, dtype: str | None = None) -> Any:
    """A state's ArraySpecs from its shapes: a parameter's path is part of the path of what belongs to it.

    What has the parameter's shape lies as it does; all else (counts, statistics of rows or columns) is on every device.
    """
    known = [(f"/{name}/", array) for name, array in named_leaves(abstract)]
    nothing = ArraySpec((-1,), "float32", ("whole",))

    def one(path: tuple[Any, ...], leaf: Any) -> ArraySpec:
        here = f"/{path_name(path)}/"
        owner = next((array for name, array in known if name in here and array.shape == leaf.shape), nothing)
        return like(leaf, owner, dtype or str(leaf.dtype))

    return jax.tree_util.tree_map_with_path(one, state)


def single(path: str, array: ArraySpec) -> ArraySpec:
    """One layer's part of a parameter."""
    if not path.startswith(LAYERS):
        return array
    return dataclasses.replace(array, shape=array.shape[1:], axes=array.axes[1:])


def stacked(path: str, parameter: Any, state: State) -> State:
    """What is kept of one layer's part, for all layers."""
    if not path.startswith(LAYERS):
        return state
    lead = parameter.shape[0]
    return jax.tree.map(
        lambda leaf: dataclasses.replace(leaf, shape=(lead, *leaf.shape), axes=("layers", *leaf.axes)), state
    )


def as_spec(leaf: Any) -> ArraySpec:
    """The ArraySpec of a parameter; of an array without logical axes, one that is on every device."""
    if isinstance(leaf, ArraySpec):
        return leaf
    return ArraySpec(tuple(leaf.shape), str(leaf.dtype), ("whole",) * len(leaf.shape))


def _one_layer(every: dict[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Of everything stacked, one layer of the largest kind."""
    kinds: dict[str, dict[str, ArraySpec]] = {}
    for path, leaf in every.items():
        if path.startswith(LAYERS):
            kinds.setdefault(path.split("/")[1], {})[path] = single(path, leaf)
    return max(kinds.values(), key=lambda leaves: sum(leaf.size for leaf in leaves.values()), default={})


def _begun(spec: ArraySpec) -> Array:
    return (jnp.ones if spec.init == "ones" else jnp.zeros)(spec.shape, spec.dtype)


def _wide(leaf: Array) -> Array:
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
