"""APOLLO: gradients scaled as AdamW scales a random projection of them (https://arxiv.org/abs/2412.05270)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, bias_corrections, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.galore import by_projection, project, projected_spec, projector_spec, projects_right
from meshtune.optim.optimizer import ChooseByRole, ParamOptimizer, State, UpdateContext, apply_decay

GROWTH = 1.01  # the maximum ratio of an update's norm to that of the update before (https://arxiv.org/abs/2410.01623)
TINY = 1e-8


def apollo(config: OptimizerConfig) -> ChooseByRole:
    """State of a matrix: the moments of the projected gradient, and the norm of its last update.

    The projector is not stored: it is drawn from a seed that changes every `update_gap` updates.
    """
    low_rank = ParamOptimizer(functools.partial(_specs, config), functools.partial(_update, config), sequential=True)
    return by_projection("apollo", config.rank, low_rank, adamw(config))


def random_projector(config: OptimizerConfig, parameter: Array, context: UpdateContext) -> Array:
    """The random projector of a matrix at an update, normal with variance 1 / rank."""
    shape = projector_spec(ArraySpec(parameter.shape, "float32", ("whole", "whole")), config.rank, "float32").shape
    return jax.random.normal(context.key(config.seed, context.count // config.update_gap), shape) / math.sqrt(
        config.rank
    )


def _specs(config: OptimizerConfig, parameter: ArraySpec) -> State:
    moment = projected_spec(parameter, config.rank, config.state_dtype or parameter.dtype)
    return {"m": moment, "v": moment, "norm": ArraySpec((), "float32", (), "zeros")}


def _update(
    config: OptimizerConfig, gradient: Array, state: State, parameter: Array, context: UpdateContext
) -> tuple[Array, State]:
    projected = project(gradient, random_projector(config, parameter, context))
    m, v = moments(config, projected, state)
    scaled = m / (jnp.sqrt(v) + config.eps)
    axis = None if config.scaling == "tensor" else 1 if projects_right(parameter.shape) else 0
    keep = config.scaling == "channel"
    factor = _norm(scaled, axis, keep) / (_norm(projected, axis, keep) + TINY)
    update = gradient * factor
    norm = jnp.linalg.norm(update)
    limit = jnp.where(context.count == 0, 1.0, jnp.maximum(norm / (state["norm"] + TINY), GROWTH) / GROWTH)
    first, second = bias_corrections(config, context)
    scale = math.sqrt(1.0 if config.scale is None else config.scale)
    change = apply_decay(context, scale * jnp.sqrt(second) / first * (update / limit), parameter)
    return change, {"m": m, "v": v, "norm": norm / limit}


def _norm(x: Array, axis: int | None, keep: bool) -> Array:
    return jnp.sqrt(jnp.sum(x * x, axis=axis, keepdims=keep))
