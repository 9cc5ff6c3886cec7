"""Muon (https://kellerjordan.github.io/posts/muon).

Matrices of the layers, and each expert's, are updated by it; embedding, output head, routers, short convolutions and
vectors by AdamW, as the author advises.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw
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

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
MOMENTUM = 0.95
RMS = 0.2  # of AdamW's updates, empirically (https://arxiv.org/abs/2502.16982)


def muon(config: OptimizerConfig) -> ChooseByRole:
    """State of a matrix: its momentum. With `match_rms` its updates are as large as AdamW's, so that both use one
    learning rate; without, they are scaled by sqrt(max(1, out / in)), as the author scales them."""
    orthogonalised = ParamOptimizer(
        functools.partial(_specs, config), functools.partial(_update, config), sequential=True
    )
    elementwise = adamw(config)

    def choose(path: str, parameter: ArraySpec) -> ParamOptimizer:
        match parameter.role:
            case "matrix" | "experts":
                return orthogonalised
            case "router" | "vector" | "table" | "head" | "conv":
                return elementwise
            case _:
                raise refuse_role("muon", path, parameter)

    return choose


def orthogonal(matrix: Float[Array, "o i"]) -> Float[Array, "o i"]:
    """The matrix with singular values brought near 1 (between about 0.7 and 1.2), by five steps of the iteration."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / jnp.maximum(jnp.linalg.norm(x), EPS)
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def _specs(config: OptimizerConfig, parameter: ArraySpec) -> State:
    return {"momentum": state_like(parameter, config.state_dtype)}


def _update(
    config: OptimizerConfig, gradient: Array, state: State, parameter: Array, context: UpdateContext
) -> tuple[Array, State]:
    beta = MOMENTUM if config.momentum is None else config.momentum
    momentum = beta * state["momentum"] + (1 - beta) * gradient
    nesterov = beta * momentum + (1 - beta) * gradient
    out, into = parameter.shape
    scale = RMS * math.sqrt(max(out, into)) if config.match_rms else math.sqrt(max(1, out / into))
    return apply_decay(context, scale * orthogonal(nesterov), parameter), {"momentum": momentum}
