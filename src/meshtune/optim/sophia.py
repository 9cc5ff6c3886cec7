"""Sophia: momentum over the curvature's running mean, clipped at one (https://arxiv.org/abs/2305.14342), optax's own.

The curvature is the paper's Gauss-Newton-Bartlett estimate (Sophia-G), which the train step makes of targets that the
model draws itself (objectives.curvature), every `curvature_every` updates.
"""

from __future__ import annotations

from typing import Any

import optax
from optax.contrib import sophia as by_curvature

from meshtune.optim.config import OptimizerConfig
from meshtune.optim.schedules import Schedule


def sophia(config: OptimizerConfig, schedule: Schedule, decayed: Any) -> optax.GradientTransformationExtraArgs:
    """Changes, rate and decay included; `update` is given `curvature`, a function () -> the diagonal estimate, a tree
    as the gradients are. `decayed` is a tree of bools, whether a parameter is decayed."""
    return by_curvature(
        schedule,
        b1=config.beta1,
        b2=0.99 if config.beta2 is None else config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        weight_decay_mask=decayed,
        gamma=config.gamma,
        update_interval=config.curvature_every,
        hessian_diagonal_fn=optax.GradientTransformationExtraArgs(_nothing, _given),
    )


def _nothing(params: Any) -> optax.EmptyState:
    return optax.EmptyState()


def _given(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
    return given["curvature"](), state
