"""Optimizers of whole trees, with optax's interface, from optimizers of single parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshtune.arrays.paths import named_leaves
from meshtune.arrays.spec import LAYERS, ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.model.gather import to_device
from meshtune.optim.blocks import BlockSchedule
from meshtune.optim.param_optimizer import COUNT, PARAM_STATE, ParamOptimizer, State, UpdateContext
from meshtune.optim.rounding import Rounding, to_nearest
from meshtune.optim.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer as a train step uses it; `init` and `update` as in optax, updates to be added as `rounding` says.

    `specs(abstract)` is the state of a tree of ArraySpecs as ArraySpecs of the same structure, read by initialisation,
    layout and memory estimates. `schedule` gives the learning rate of an update. `eval_params(trainable, state)` are
    the parameters to evaluate and to export, where these are not the trained ones (None).
    `update_param(path, gradient, state, parameter, count, layer)` updates one parameter of one layer and returns
    (parameter, state); None where an update needs all gradients. It accepts some rows of a matrix for the paths in
    `row_separable`; the paths in `stacked` are those of parameters with a layers axis.
    An optimizer with `in_backward` updates a layer as soon as the backward pass has its gradient
    (train.step.layerwise); with `blocks` the layers are trained in turns (optim.blocks); an optimizer that
    `needs_hessian` is also given `curvature`, a function () -> the diagonal of the loss's Hessian, a tree like the
    gradients.
    """

    init: Callable[[Tree], State]
    update: Callable[..., tuple[Tree, State]]
    specs: Callable[[Tree], State]
    schedule: Schedule
    eval_params: Callable[[Tree, State], Tree] | None = None
    update_param: Callable[..., tuple[Array, State]] | None = None
    row_separable: frozenset[str] = frozenset()
    stacked: frozenset[str] = frozenset()
    in_backward: bool = False
    blocks: BlockSchedule | None = None
    needs_hessian: bool = False
    rounding: Rounding = to_nearest

    def evaluated(self, trainable: Tree, state: State) -> Tree:
        """The parameters to evaluate and to export."""
        return trainable if self.eval_params is None else self.eval_params(trainable, state)

    def gradients(self, abstract: Tree) -> dict[str, ArraySpec]:
        """The gradients that exist at once, float32, by path."""
        gradients = {path: dataclasses.replace(leaf, dtype="float32") for path, leaf in named_leaves(abstract)}
        if not self.in_backward and self.blocks is None:
            return gradients
        outside = {path: leaf for path, leaf in gradients.items() if not leaf.is_stacked}
        return ({} if self.blocks else outside) | _largest_layer(gradients)


def by_parameter(
    optimizers: Mapping[str, ParamOptimizer],
    parameters: Mapping[str, ArraySpec],
    schedule: Schedule,
    decay: Mapping[str, float],
    factors: Mapping[str, float] | None = None,
    rounding: Rounding = to_nearest,
) -> Optimizer:
    """An optimizer that updates every parameter of every layer separately, by the ParamOptimizer of its path.

    `parameters` are the trainable leaves by path, `decay` their weight decays, `factors` what the schedule's learning
    rate is multiplied by (1 if None). Arithmetic is in float32 whatever the dtypes of parameters and state. The state
    holds the number of updates made and, by path, the state of each parameter, stacked like the parameter.
    """
    stacked = frozenset(path for path, array in parameters.items() if array.is_stacked)

    def update_param(path: str, gradient: Array, state: State, parameter: Array, count: Array, layer: Array):
        change, state = _change(path, gradient, state, parameter, count, layer)
        return rounding(to_float32(parameter) + change, parameter.dtype, path, layer, count), state

    def _change(path: str, gradient: Array, state: State, parameter: Array, count: Array, layer: Array):
        rate = schedule(count) if factors is None else schedule(count) * factors[path]
        context = UpdateContext(path, layer, count, rate, decay[path])
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
        wide = jax.tree.map(to_float32, state)
        change, new = optimizers[path].update(to_float32(gradient), wide, to_float32(parameter), context)
        return change, jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), new, dtypes)

    def specs(abstract: Tree) -> State:
        states = {path: _state_of(leaf, optimizers[path]) for path, leaf in named_leaves(abstract)}
        return {COUNT: ArraySpec((), "int32", (), "zeros"), PARAM_STATE: states}

    def init(tree: Tree) -> State:
        states = {path: jax.tree.map(_initial, _state_of(parameters[path], optimizers[path])) for path in parameters}
        for path, leaf in named_leaves(tree):
            start = optimizers[path].init
            if start is not None:
                dtypes = jax.tree.map(lambda state: state.dtype, states[path])
                new = (jax.vmap(start) if path in stacked else start)(to_float32(to_device(leaf)))
                states[path] = jax.tree.map(lambda new, dtype: new.astype(dtype), new, dtypes)
        return {COUNT: jnp.zeros((), jnp.int32), PARAM_STATE: states}

    def update(gradients: Tree, state: State, tree: Tree) -> tuple[Tree, State]:
        count, changes, states = state[COUNT], [], {}
        for (path, gradient), parameter in zip(named_leaves(gradients), jax.tree.leaves(tree), strict=True):
            before = state[PARAM_STATE][path]
            if path not in stacked:
                change, after = _change(path, gradient, before, parameter, count, jnp.int32(0))
            elif optimizers[path].sequential:
                change, after = sequentially(
                    lambda g, s, p, layer, path=path: _change(path, g, s, p, count, layer), gradient, before, parameter
                )
            else:
                by_layer = jax.vmap(lambda g, s, p, layer, path=path: _change(path, g, s, p, count, layer))
                change, after = by_layer(gradient, before, parameter, jnp.arange(parameter.shape[0]))
            changes.append(change)
            states[path] = after
        return jax.tree.unflatten(jax.tree.structure(gradients), changes), {COUNT: count + 1, PARAM_STATE: states}

    # Random bits are drawn for whole matrices: parts of one would draw the same ones.
    by_rows = [path for path, optimizer in optimizers.items() if optimizer.by_rows and rounding is to_nearest]
    parts = {"row_separable": frozenset(by_rows), "stacked": stacked, "rounding": rounding}
    return Optimizer(init, update, specs, schedule, update_param=update_param, **parts)


def sequentially(change: Callable[..., tuple[Array, State]], gradient: Array, state: State, parameter: Array):
    """Updates a stack layer after layer, overwriting gradient and state, so that the temporary arrays of an update
    exist for one layer at a time."""

    def layer(index: Array, running: tuple[Array, State]) -> tuple[Array, State]:
        changes, states = running
        one_layer = jax.tree.map(lambda leaf: leaf[index], (changes, states, parameter))
        updated = change(*one_layer, index)
        return jax.tree.map(lambda stack, new: stack.at[index].set(new.astype(stack.dtype)), running, updated)

    return lax.fori_loop(0, parameter.shape[0], layer, (to_float32(gradient), state))


def _state_of(parameter: ArraySpec, optimizer: ParamOptimizer) -> State:
    """The state of a parameter, of all layers where it is stacked."""
    state = optimizer.specs(parameter.layer)
    if not parameter.is_stacked:
        return state
    layers = parameter.shape[0]
    return jax.tree.map(
        lambda leaf: dataclasses.replace(leaf, shape=(layers, *leaf.shape), axes=(LAYERS, *leaf.axes)), state
    )


def _largest_layer(arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Of all stacked arrays, one layer of the largest kind; the first two parts of a path name a kind of layer."""
    kinds: dict[str, dict[str, ArraySpec]] = {}
    for path, leaf in arrays.items():
        if leaf.is_stacked:
            kinds.setdefault("/".join(path.split("/")[:2]), {})[path] = leaf.layer
    return max(kinds.values(), key=lambda leaves: sum(leaf.size for leaf in leaves.values()), default={})


def _initial(spec: ArraySpec) -> Array:
    return (jnp.ones if spec.init == "ones" else jnp.zeros)(spec.shape, spec.dtype)


def to_float32(leaf: Array) -> Array:
    """A floating-point array in float32, any other unchanged."""
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
