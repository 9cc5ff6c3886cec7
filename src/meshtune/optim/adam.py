"""AdamW (https://arxiv.org/abs/1711.05101), and Adam-mini (https://arxiv.org/abs/2406.16793), which has one second
moment for a block of numbers.

The blocks are those of the authors' code: a head of the queries and of the keys (and of the values, where one
projection computes all three), a row of every other matrix (a neuron, or a token of the embedding and of the output
head), a norm's whole vector. Biases, and the filters of short convolutions, have a moment for every number.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import (
    ChooseByRole,
    ParamOptimizer,
    State,
    UpdateContext,
    apply_decay,
    refuse_role,
    state_like,
)


def adamw(config: OptimizerConfig) -> ParamOptimizer:
    """State: the moments m and v, in the parameter's shape."""

    def specs(parameter: ArraySpec) -> State:
        moment = state_like(parameter, config.state_dtype)
        return {"m": moment, "v": moment}

    def update(gradient: Array, state: State, parameter: Array, context: UpdateContext) -> tuple[Array, State]:
        m, v = moments(config, gradient, state)
        return apply_decay(context, direction(config, m, v, context), parameter), {"m": m, "v": v}

    return ParamOptimizer(specs, update, by_rows=True)


def second_decay(config: OptimizerConfig) -> float:
    """The decay of Adam's second moment."""
    return 0.999 if config.beta2 is None else config.beta2


def moments(config: OptimizerConfig, gradient: Array, state: State, square: Array | None = None) -> tuple[Array, Array]:
    """The next first and second moments; `square`, if given, replaces the square of the gradient in the second."""
    b1, b2 = config.beta1, second_decay(config)
    m = b1 * state["m"] + (1 - b1) * gradient
    return m, b2 * state["v"] + (1 - b2) * (gradient * gradient if square is None else square)


def direction(config: OptimizerConfig, m: Array, v: Array, context: UpdateContext) -> Array:
    """m over the root of v, both bias-corrected."""
    first, second = bias_corrections(config, context)
    return (m / first) / (jnp.sqrt(v / second) + config.eps)


def bias_corrections(config: OptimizerConfig, context: UpdateContext) -> tuple[Array, Array]:
    """The divisors of the two moments at the t-th update: 1 - beta1^t and 1 - beta2^t."""
    t = (context.count + 1).astype(jnp.float32)
    return 1 - config.beta1**t, 1 - second_decay(config) ** t


def adam_mini(config: OptimizerConfig) -> ChooseByRole:
    """State: the first moment m in the parameter's shape, and v with one number for each block."""

    def choose(path: str, parameter: ArraySpec) -> ParamOptimizer:
        match parameter.role:
            case "matrix" | "experts" | "router" | "table" | "head":
                rows = parameter.head_rows
                return ParamOptimizer(
                    functools.partial(_matrix_specs, config, rows), functools.partial(_matrix_update, config, rows)
                )
            case "vector" if path.rpartition("/")[2] != "bias":  # both have this role: only the name tells a bias
                return ParamOptimizer(
                    functools.partial(_vector_specs, config), functools.partial(_vector_update, config)
                )
            case "vector" | "conv":
                return adamw(config)
            case _:
                raise refuse_role("adam_mini", path, parameter)

    return choose


def _matrix_specs(config: OptimizerConfig, rows: int, parameter: ArraySpec) -> State:
    blocks = (parameter.shape[0] // rows,)
    v = ArraySpec(blocks, config.state_dtype or parameter.dtype, parameter.axes[:1], "zeros")
    return {"m": state_like(parameter, config.state_dtype), "v": v}


def _matrix_update(
    config: OptimizerConfig, rows: int, gradient: Array, state: State, parameter: Array, context: UpdateContext
) -> tuple[Array, State]:
    """A second moment for each block of `rows` rows."""
    mean_square = (gradient * gradient).reshape(parameter.shape[0] // rows, -1).mean(axis=1)
    m, v = moments(config, gradient, state, mean_square)
    v_of_rows = jnp.repeat(v, rows)[:, None]
    return apply_decay(context, direction(config, m, v_of_rows, context), parameter), {"m": m, "v": v}


def _vector_specs(config: OptimizerConfig, parameter: ArraySpec) -> State:
    v = ArraySpec((), config.state_dtype or parameter.dtype, (), "zeros")
    return {"m": state_like(parameter, config.state_dtype), "v": v}


def _vector_update(
    config: OptimizerConfig, gradient: Array, state: State, parameter: Array, context: UpdateContext
) -> tuple[Array, State]:
    """One second moment for the whole vector."""
    m, v = moments(config, gradient, state, (gradient * gradient).mean())
    return apply_decay(context, direction(config, m, v, context), parameter), {"m": m, "v": v}
