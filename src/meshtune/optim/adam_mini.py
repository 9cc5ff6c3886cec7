"""Adam-mini: one second moment for each block of a parameter (https://arxiv.org/abs/2406.16793).

The blocks are those of the authors' code: a head of the queries and of the keys (and of the values, where one
projection computes all three), a row of every other matrix (a neuron, or a token of the embedding and of the output
head), a norm's whole vector. Biases, and the filters of short convolutions, have a moment for every number.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import (
    ChooseByRole,
    ParamOptimizer,
    State,
    UpdateContext,
    apply_decay,
    state_like,
)
from meshtune.optim.roles import refuse_role


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
