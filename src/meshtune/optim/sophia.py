"""Sophia: momentum over the running mean of the curvature, clipped at one (https://arxiv.org/abs/2305.14342), optax's
implementation.

The curvature is the paper's Gauss-Newton-Bartlett estimate (Sophia-G), which the train step computes from targets
sampled from the model itself (objectives.curvature), every `curvature_every` updates.
"""

from __future__ import annotations

from collections.abc import Callable

import optax
from optax.contrib import sophia as optax_sophia

from meshtune.arrays.tree import Tree
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import Schedule, State


def sophia(config: OptimizerConfig, schedule: Schedule, decayed: Tree) -> optax.GradientTransformationExtraArgs:
    """Changes, learning rate and decay included.

    `update` takes `curvature`, a function () -> the diagonal estimate, a tree like the gradients. `decayed` is a tree
    of bools, whether a parameter is decayed.
    """
    return optax_sophia(
        schedule,
        b1=config.beta1,
        b2=0.99 if config.beta2 is None else config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        weight_decay_mask=decayed,
        gamma=config.gamma,
        update_interval=config.curvature_every,
        hessian_diagonal_fn=optax.GradientTransformationExtraArgs(_no_state, _curvature),
    )


def _no_state(params: optax.Params) -> optax.EmptyState:
    return optax.EmptyState()


def _curvature(
    updates: optax.Updates, state: State, params: optax.Params | None = None, **extra: Callable[[], optax.Updates]
) -> tuple[optax.Updates, State]:
    return extra["curvature"](), state
