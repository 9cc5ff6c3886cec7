"""GaLore: AdamW on gradients projected onto their largest singular directions (https://arxiv.org/abs/2403.03507)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import ChooseByRole, ParamOptimizer, State, UpdateContext, apply_decay
from meshtune.optim.projection import (
    by_projection,
    project,
    project_back,
    projected_spec,
    projector_spec,
    projects_right,
)

SCALE = 0.25  # of the projected update


def galore(config: OptimizerConfig) -> ChooseByRole:
    """State of a matrix: its projector, recomputed every `update_gap` updates, and the projected gradient's moments."""
    low_rank = ParamOptimizer(functools.partial(_specs, config), functools.partial(_update, config), sequential=True)
    return by_projection("galore", config.rank, low_rank, adamw(config))


def main_directions(gradient: Float[Array, "o i"], rank: int) -> Array:
    """The first `rank` singular vectors, right ones [rank, in] of a tall matrix, else left ones [out, rank].

    Each has the sign that makes its largest component positive, so that the same gradient gives the same projector.
    """
    u, _, vt = jnp.linalg.svd(gradient, full_matrices=False)
    rows = vt[:rank] if projects_right(gradient.shape) else u[:, :rank].T
    largest = jnp.take_along_axis(rows, jnp.abs(rows).argmax(axis=1)[:, None], axis=1)
    rows = rows * jnp.where(largest < 0, -1.0, 1.0)
    return rows if projects_right(gradient.shape) else rows.T


def _specs(config: OptimizerConfig, parameter: ArraySpec) -> State:
    dtype = config.state_dtype or parameter.dtype
    moment = projected_spec(parameter, config.rank, dtype)
    return {"projector": projector_spec(parameter, config.rank, dtype), "m": moment, "v": moment}


def _update(
    config: OptimizerConfig, gradient: Array, state: State, parameter: Array, context: UpdateContext
) -> tuple[Array, State]:
    # Rounded to the dtype it is stored in, so that this update and the later ones use the same directions.
    dtype = jnp.dtype(config.state_dtype or jnp.float32)
    projector = lax.cond(
        context.count % config.update_gap == 0,
        lambda: main_directions(gradient, config.rank).astype(dtype).astype(jnp.float32),
        lambda: state["projector"],
    )
    m, v = moments(config, project(gradient, projector), state)
    update = project_back(direction(config, m, v, context), projector, parameter.shape)
    scale = SCALE if config.scale is None else config.scale
    return apply_decay(context, scale * update, parameter), {"projector": projector, "m": m, "v": v}
