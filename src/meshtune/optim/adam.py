"""AdamW (https://arxiv.org/abs/1711.05101); eps outside the root of the bias-corrected second moment, as in torch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import ParamOptimizer, State, UpdateContext, apply_decay, state_like


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
