"""Optimizers of whole trees, with optax's interface, from optimizers of single parameters."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, Key

from meshtune.arrays.spec import LAYERS, ArraySpec, unknown_role
from meshtune.arrays.tree import Tree, named_leaves, stack_path
from meshtune.errors import UserError
from meshtune.model.gather import to_device
from meshtune.optim.config import OptimizerConfig, share_of

if TYPE_CHECKING:
    from meshtune.optim.blocks import BlockSchedule

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


# (updated value in float32, dtype to store it in, path, layer, updates made before) -> the stored value
Rounding = Callable[[Array, jnp.dtype, str, Int[Array, ""], Int[Array, ""]], Array]

ROUNDS = 0x726E64  # folded into the key, so that its random numbers differ from those of projections


def to_nearest(value: Array, dtype: jnp.dtype, path: str, layer: Array, count: Array) -> Array:
    """The nearest number of the dtype."""
    return value.astype(dtype)


def stochastic(seed: int) -> Rounding:
    """Rounds to bfloat16 up or down, with the probability that makes the expected value the exact one.

    Random bits are a function of seed, path, layer and update, so that they depend neither on the mesh nor on where a
    run was resumed. Other dtypes are rounded to nearest.
    """

    def round_value(value: Array, dtype: jnp.dtype, path: str, layer: Array, count: Array) -> Array:
        if dtype != jnp.bfloat16:
            return value.astype(dtype)
        context = UpdateContext(path, layer, count, jnp.zeros(()), 0.0)
        return round_stochastically(value, jax.random.fold_in(context.key(seed, count), ROUNDS))

    return round_value


def add_updates(
    tree: Tree, updates: Tree, count: Int[Array, ""], stacked: Collection[str], rounding: Rounding = to_nearest
) -> Tree:
    """Adds float32 updates to parameters; `stacked` are the paths of those with a layers axis."""

    def add(path: str, parameter: Array, update: Array) -> Array:
        value, dtype = parameter.astype(jnp.float32) + update, parameter.dtype
        if path not in stacked:
            return rounding(value, dtype, path, jnp.int32(0), count)
        round_layers = jax.vmap(lambda value, layer: rounding(value, dtype, path, layer, count))
        return round_layers(value, jnp.arange(len(value)))

    pairs = zip(named_leaves(tree), jax.tree.leaves(updates), strict=True)
    added = [add(path, parameter, update) for (path, parameter), update in pairs]
    return jax.tree.unflatten(jax.tree.structure(tree), added)


def round_stochastically(value: Float[Array, "..."], key: Key[Array, ""]) -> BFloat16[Array, "..."]:
    """A bfloat16 is the upper half of a float32: adding a random lower half carries with the probability of its share.
    Infinities and NaN are returned unchanged."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    carried = bits + jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    upper = lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(value), upper, value.astype(jnp.bfloat16))


Schedule = Callable[[jax.typing.ArrayLike], Float[Array, ""]]


# Each takes (config, warm-up steps, total steps) and gives the share of the peak after warm-up at a float32 step.
Decay = Callable[[Float[Array, ""]], Float[Array, ""]]


def _linear(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    return lambda step: _floor(config, jnp.maximum(0.0, (total - step) / max(1, total - warmup)))


def _cosine(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    def decay(step):
        progress = jnp.minimum((step - warmup) / max(1, total - warmup), 1.0)
        return _floor(config, 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))

    return decay


def _constant(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    return lambda step: jnp.ones_like(step)


def _wsd(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    """Warm-up, stable, decay (https://arxiv.org/abs/2404.06395), with a cosine as the decay."""
    length = max(1, min(share_of(config.decay_ratio, total), total - warmup))

    def decay(step):
        progress = jnp.clip((step - (total - length)) / length, 0.0, 1.0)
        return _floor(config, 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))

    return decay


def _inverse_sqrt(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    timescale = warmup or 10_000
    shift = timescale - warmup
    return lambda step: jnp.maximum(config.min_lr_ratio, jnp.sqrt(timescale / jnp.maximum(step + shift, 1.0)))


def _floor(config: OptimizerConfig, share: Array) -> Array:
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


SCHEDULES: dict[str, Callable[[OptimizerConfig, int, int], Decay]] = {
    "linear": _linear,
    "cosine": _cosine,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
# Of these the value at a step does not depend on the length of the run, so that a finished run can go on.
ENDLESS = frozenset({"constant", "inverse_sqrt"})


def make_schedule(config: OptimizerConfig, total: int) -> Schedule:
    """The schedule of a run of `total` updates: int32 step (0 is the first update) -> float32 learning rate."""
    warmup = config.warmup(total)
    decay = SCHEDULES[config.schedule](config, warmup, total)

    def schedule(step: Int[Array, ""] | jax.typing.ArrayLike) -> Float[Array, ""]:
        at = jnp.asarray(step, jnp.float32)
        return config.learning_rate * jnp.where(at < warmup, at / max(1, warmup), decay(at))

    return schedule


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

    def evaluation_params(self, trainable: Tree, state: State) -> Tree:
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
    """Of all stacked arrays, one layer of the largest kind."""
    kinds: dict[str, dict[str, ArraySpec]] = {}
    for path, leaf in arrays.items():
        if leaf.is_stacked:
            place = stack_path(path)
            kind = path.rpartition("/")[0] if place is None else f"{place.root}/{place.key}"
            kinds.setdefault(kind, {})[path] = leaf.layer
    return max(kinds.values(), key=lambda leaves: sum(leaf.size for leaf in leaves.values()), default={})


def _initial(spec: ArraySpec) -> Array:
    return (jnp.ones if spec.init == "ones" else jnp.zeros)(spec.shape, spec.dtype)


def to_float32(leaf: Array) -> Array:
    """A floating-point array in float32, any other unchanged."""
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def refuse_role(optimizer: str, path: str, parameter: ArraySpec) -> UserError:
    """The error for a parameter whose role an optimizer has no rule for."""
    return unknown_role(
        optimizer,
        path,
        parameter,
        where="optimizer.name",
        fix="use optimizer.name=adamw, or leave the parameter frozen (method: freeze or lora)",
    )


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
