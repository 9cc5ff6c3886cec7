"""GaLore (https://arxiv.org/abs/2403.03507), and the projection of gradients that APOLLO shares."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import ChooseByRole, ParamOptimizer, State, UpdateContext, apply_decay, refuse_role


def is_projected(parameter: ArraySpec, rank: int) -> bool:
    """Whether a gradient is projected: that of a matrix, or of each expert, with more rows and columns than the rank.

    `parameter` is one layer's."""
    return parameter.role in ("matrix", "experts") and min(parameter.shape[-2:]) > rank


def by_projection(name: str, rank: int, projected: ParamOptimizer, full: ParamOptimizer) -> ChooseByRole:
    """`projected` for the matrices of the layers; `full` for the rest, as the authors have it for embedding, output
    head and norms, and for matrices that are not larger than the rank."""

    def choose(path: str, parameter: ArraySpec) -> ParamOptimizer:
        match parameter.role:
            case "matrix" | "experts":
                return projected if is_projected(parameter, rank) else full
            case "router" | "vector" | "table" | "head" | "conv":
                return full
            case _:
                raise refuse_role(name, path, parameter)

    return choose


def projects_right(shape: tuple[int, ...]) -> bool:
    """Whether a gradient [out, in] is projected from the right, to [out, rank]; else from the left, to [rank, in]."""
    return shape[0] >= shape[1]


def projected_spec(parameter: ArraySpec, rank: int, dtype: str) -> ArraySpec:
    """State in the shape of the projected gradient: [out, rank] or [rank, in]."""
    (out, into), (out_axis, in_axis) = parameter.shape, parameter.axes
    if projects_right(parameter.shape):
        return ArraySpec((out, rank), dtype, (out_axis, "rank"), "zeros")
    return ArraySpec((rank, into), dtype, ("rank", in_axis), "zeros")


def projector_spec(parameter: ArraySpec, rank: int, dtype: str) -> ArraySpec:
    """The projector: [rank, in] from the right, [out, rank] from the left."""
    (out, into), (out_axis, in_axis) = parameter.shape, parameter.axes
    if projects_right(parameter.shape):
        return ArraySpec((rank, into), dtype, ("rank", in_axis), "zeros")
    return ArraySpec((out, rank), dtype, (out_axis, "rank"), "zeros")


def project(gradient: Float[Array, "o i"], projector: Array) -> Array:
    """The projected gradient, [out, rank] or [rank, in]."""
    return gradient @ projector.T if projects_right(gradient.shape) else projector.T @ gradient


def project_back(projected: Array, projector: Array, shape: tuple[int, ...]) -> Float[Array, "o i"]:
    """A projected update in the matrix's own `shape`."""
    return projected @ projector if projects_right(shape) else projector @ projected


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
