"""Gradients projected to a low rank: which parameters, on which side, and back (GaLore, APOLLO)."""

from __future__ import annotations

from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.optimizer import ChooseByRole, ParamOptimizer
from meshtune.optim.roles import refuse_role


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
