"""Which matrices low-rank methods treat as such, and on which side their gradients are made narrow."""

from __future__ import annotations

from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec


def is_narrowed(path: str, parameter: ArraySpec, rank: int) -> bool:
    """A matrix inside the layers with more rows and columns than the rank; all else has plain AdamW, as the authors
    have it for embedding, output head and norms."""
    return path.startswith("layers/") and len(parameter.shape) == 2 and min(parameter.shape) > rank


def tall(shape: tuple[int, ...]) -> bool:
    """Whether the columns of a matrix [out, in] are projected (from the right); else its rows (from the left)."""
    return shape[0] >= shape[1]


def narrow_spec(parameter: ArraySpec, rank: int, dtype: str) -> ArraySpec:
    """What is kept of the narrow gradient: [out, rank] or [rank, in]."""
    (out, into), (out_axis, in_axis) = parameter.shape, parameter.axes
    if tall(parameter.shape):
        return ArraySpec((out, rank), dtype, (out_axis, "rank"), "zeros")
    return ArraySpec((rank, into), dtype, ("rank", in_axis), "zeros")


def projector_spec(parameter: ArraySpec, rank: int, dtype: str) -> ArraySpec:
    """The projector: [rank, in] from the right, [out, rank] from the left."""
    (out, into), (out_axis, in_axis) = parameter.shape, parameter.axes
    if tall(parameter.shape):
        return ArraySpec((rank, into), dtype, ("rank", in_axis), "zeros")
    return ArraySpec((out, rank), dtype, (out_axis, "rank"), "zeros")


def narrowed(gradient: Float[Array, "o i"], projector: Array) -> Array:
    """The gradient seen through the projector."""
    return gradient @ projector.T if tall(gradient.shape) else projector.T @ gradient


def widened(narrow: Array, projector: Array, shape: tuple[int, ...]) -> Float[Array, "o i"]:
    """Back in a matrix of `shape`."""
    return narrow @ projector if tall(shape) else projector @ narrow
