"""GaLore: AdamW on gradients projected onto their largest singular directions (https://arxiv.org/abs/2403.03507)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.projection import is_narrowed, narrow_spec, narrowed, projector_spec, tall, widened
from meshtune.optim.rule import At, Rule, Rules, State, descent

SCALE = 0.25  # of the projected update


def galore(config: OptimizerConfig) -> Rules:
    """State of a matrix: its projector, found anew every `update_gap` updates, and the narrow gradient's moments."""
    low = Rule(functools.partial(_specs, config), functools.partial(_update, config), sequential=True)
    full = adamw(config)

    def choose(path: str, parameter: ArraySpec) -> Rule:
        return low if is_narrowed(path, parameter, config.rank) else full

    return choose


def main_directions(gradient: Float[Array, "o i"], rank: int) -> Array:
    """The first `rank` singular vectors, right ones [rank, in] of a tall matrix, else left ones [out, rank].

    Each has the sign that makes its largest component positive, so that the same gradient gives the same projector.
    """
    u, _, vt = jnp.linalg.svd(gradient, full_matrices=False)
    rows = vt[:rank] if tall(gradient.shape) else u[:, :rank].T
    largest = jnp.take_along_axis(rows, jnp.abs(rows).argmax(axis=1)[:, None], axis=1)
    rows = rows * jnp.where(largest < 0, -1.0, 1.0)
    return rows if tall(gradient.shape) else rows.T


def _specs(config: OptimizerConfig, parameter: ArraySpec) -> State:
    dtype = config.state_dtype or parameter.dtype
    moment = narrow_spec(parameter, config.rank, dtype)
    return {"projector": projector_spec(parameter, config.rank, dtype), "m": moment, "v": moment}


def _update(config: OptimizerConfig, gradient: Array, state: State, parameter: Array, at: At) -> tuple[Array, State]:
    # Rounded as it is kept, so that this update and the later ones see the same directions.
    kind = jnp.dtype(config.state_dtype or jnp.float32)
    projector = lax.cond(
        at.count % config.update_gap == 0,
        lambda: main_directions(gradient, config.rank).astype(kind).astype(jnp.float32),
        lambda: state["projector"],
    )
    m, v = moments(config, narrowed(gradient, projector), state)
    found = widened(direction(config, m, v, at), projector, parameter.shape)
    scale = SCALE if config.scale is None else config.scale
    return descent(at, scale * found, parameter), {"projector": projector, "m": m, "v": v}
