"""Adam-mini: one second moment for each block of a parameter (https://arxiv.org/abs/2406.16793).

The blocks are those of the authors' code: a head of the queries and of the keys (and of the values, where one
projection makes all three), a row of every other matrix (a neuron, or a token of the embedding and of the output head),
a norm's whole vector; biases have a moment for every number.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.model.spec import ModelSpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.rule import At, Rule, Rules, State, descent, kept

BY_HEAD = ("attn/q/weight", "attn/k/weight", "attn/qkv/weight")


def adam_mini(config: OptimizerConfig, spec: ModelSpec | None) -> Rules:
    """State: the first moment m in the parameter's shape, and v, a number a block."""

    def choose(path: str, parameter: ArraySpec) -> Rule:
        if path.endswith("bias"):
            return adamw(config)
        rows = 1
        if path.endswith(BY_HEAD):
            assert spec is not None, "the blocks of queries and keys are the model's heads"
            rows = spec.head_dim
        return Rule(functools.partial(_specs, config, rows), functools.partial(_update, config, rows))

    return choose


def _specs(config: OptimizerConfig, rows: int, parameter: ArraySpec) -> State:
    vector = len(parameter.shape) == 1
    shape, axes = ((), ()) if vector else ((parameter.shape[0] // rows,), parameter.axes[:1])
    dtype = config.state_dtype or parameter.dtype
    return {"m": kept(parameter, config.state_dtype), "v": ArraySpec(shape, dtype, axes, "zeros")}


def _update(
    config: OptimizerConfig, rows: int, gradient: Array, state: State, parameter: Array, at: At
) -> tuple[Array, State]:
    vector = parameter.ndim == 1
    square = gradient * gradient
    mean = square.mean() if vector else square.reshape(parameter.shape[0] // rows, -1).mean(axis=1)
    m, v = moments(config, gradient, state, mean)
    of_each = v if vector else jnp.repeat(v, rows)[:, None]
    return descent(at, direction(config, m, of_each, at), parameter), {"m": m, "v": v}
