"""AdamW (https://arxiv.org/abs/1711.05101); eps outside the root of the bias-corrected second moment, as in torch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.rule import At, Rule, State, descent, kept


def adamw(config: OptimizerConfig) -> Rule:
    """State: the moments m and v, in the parameter's shape."""

    def specs(parameter: ArraySpec) -> State:
        moment = kept(parameter, config.state_dtype)
        return {"m": moment, "v": moment}

    def update(gradient: Array, state: State, parameter: Array, at: At) -> tuple[Array, State]:
        m, v = moments(config, gradient, state)
        return descent(at, direction(config, m, v, at), parameter), {"m": m, "v": v}

    return Rule(specs, update, by_rows=True)


def moments(config: OptimizerConfig, gradient: Array, state: State, square: Array | None = None) -> tuple[Array, Array]:
    """The next first and second moments; `square` stands for the gradient's square where it is not its own."""
    b1, b2 = config.beta1, config.adam_beta2
    m = b1 * state["m"] + (1 - b1) * gradient
    return m, b2 * state["v"] + (1 - b2) * (gradient * gradient if square is None else square)


def direction(config: OptimizerConfig, m: Array, v: Array, at: At) -> Array:
    """m over the root of v, each corrected for having begun at zero."""
    first, second = corrections(config, at)
    return (m / first) / (jnp.sqrt(v / second) + config.eps)


def corrections(config: OptimizerConfig, at: At) -> tuple[Array, Array]:
    """What the moments are to be divided by: 1 - beta^t of the t-th update."""
    t = (at.count + 1).astype(jnp.float32)
    return 1 - config.beta1**t, 1 - config.adam_beta2**t
