"""Muon: momentum made orthogonal by a Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon/).

Matrices inside the layers have it; embedding, output head and vectors have AdamW, as the author says.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.rule import At, Rule, Rules, State, descent, kept

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
MOMENTUM = 0.95
RMS = 0.2  # of AdamW's updates, empirically (https://arxiv.org/abs/2502.16982)


def muon(config: OptimizerConfig) -> Rules:
    """State of a matrix: its momentum. With `match_rms` its updates are as large as AdamW's, so that both go by one
    learning rate; without, they are scaled by sqrt(max(1, out / in)), the author's own way."""
    vectors = adamw(config)
    matrices = Rule(functools.partial(_specs, config), functools.partial(_update, config), sequential=True)

    def choose(path: str, parameter: ArraySpec) -> Rule:
        return matrices if path.startswith("layers/") and len(parameter.shape) == 2 else vectors

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
    return {"momentum": kept(parameter, config.state_dtype)}


def _update(config: OptimizerConfig, gradient: Array, state: State, parameter: Array, at: At) -> tuple[Array, State]:
    beta = MOMENTUM if config.momentum is None else config.momentum
    momentum = beta * state["momentum"] + (1 - beta) * gradient
    ahead = beta * momentum + (1 - beta) * gradient  # Nesterov's
    out, into = parameter.shape
    scale = RMS * math.sqrt(max(out, into)) if config.match_rms else math.sqrt(max(1, out / into))
    return descent(at, scale * orthogonal(ahead), parameter), {"momentum": momentum}
