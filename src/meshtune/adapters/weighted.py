"""One low-rank product from several, weighted: the arithmetic of combining adapters.

The methods, and what each does to factors A [R, in] and B [out, R] of an update scale * B A, are those of peft's
add_weighted_adapter (https://huggingface.co/docs/peft/developer_guides/model_merging): TIES
(https://arxiv.org/abs/2306.01708), DARE (https://arxiv.org/abs/2311.03099).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

# What is kept of every adapter before they are added, and how they are added.
PARTS: dict[str, tuple[Literal["all", "largest", "random"], Literal["sum", "majority"]]] = {
    "linear": ("all", "sum"),
    "magnitude_prune": ("largest", "sum"),
    "ties": ("largest", "majority"),
    "dare_linear": ("random", "sum"),
    "dare_ties": ("random", "majority"),
}
METHODS = (
    "cat",
    "svd",
    "linear",
    *(name for name in PARTS if name != "linear"),
    *(f"{name}_svd" for name in PARTS if name != "linear"),
)


@dataclasses.dataclass(frozen=True)
class Factors:
    """An adapter's update of one weight: scale * b a."""

    a: Float[np.ndarray, "r i"]
    b: Float[np.ndarray, "o r"]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def update(self) -> Float[np.ndarray, "o i"]:
        """The whole update, float32."""
        return (self.b.astype(np.float32) @ self.a.astype(np.float32)) * np.float32(self.scale)


def keeps_factors(method: str) -> bool:
    """Whether a method adds A to A and B to B, so that ranks must be equal."""
    return method in PARTS


def prunes(method: str) -> bool:
    """Whether a method keeps a part of every adapter only, and so needs a density."""
    return PARTS.get(method.removesuffix("_svd"), ("all",))[0] != "all"


def combine_factors(
    parts: Sequence[Factors],
    weights: Sequence[float],
    method: str,
    rank: int,
    *,
    density: float = 1.0,
    majority: Literal["total", "frequency"] = "total",
    draw: np.random.Generator | None = None,
) -> tuple[Float[np.ndarray, "r i"], Float[np.ndarray, "o r"]]:
    """(A, B) of rank `rank` whose product B A, with scale 1, is the weighted combination of some updates, in float32.

    cat is exact and its rank the sum of all; svd is the best approximation of the sum at `rank`; the others are rough:
    with `_svd` they work on whole updates, without on A and B by themselves.
    """
    if method == "cat":
        a = np.concatenate([_wide(part.a) * np.float32(w * part.scale) for part, w in zip(parts, weights, strict=True)])
        b = np.concatenate([_wide(part.b) for part in parts], axis=1)
        return _pad_rank(a, b, rank)
    if method == "svd":
        return _best(parts, weights, rank)
    if method.endswith("_svd"):
        update = _mix_arrays(
            [part.update for part in parts], weights, method.removesuffix("_svd"), density, majority, draw
        )
        return _split(np.linalg.svd(update.astype(np.float64), full_matrices=False), rank)
    # The root of each weight on either side; its sign on one.
    scales = [w * part.scale for part, w in zip(parts, weights, strict=True)]
    of_b = [math.sqrt(abs(w)) for w in scales]
    of_a = [math.copysign(root, w) for root, w in zip(of_b, scales, strict=True)]
    a = _mix_arrays([_wide(part.a) for part in parts], of_a, method, density, majority, draw)
    b = _mix_arrays([_wide(part.b) for part in parts], of_b, method, density, majority, draw)
    return _pad_rank(a, b, rank)


def _best(parts: Sequence[Factors], weights: Sequence[float], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The sum's truncated singular value decomposition, from that of the small matrix between two orthonormal bases:
    the sum itself, [out, in], is never made."""
    a = np.concatenate([part.a.astype(np.float64) for part in parts])
    b = np.concatenate(
        [part.b.astype(np.float64) * (w * part.scale) for part, w in zip(parts, weights, strict=True)], axis=1
    )
    left, upper = np.linalg.qr(b)
    right, lower = np.linalg.qr(a.T)
    u, s, v = np.linalg.svd(upper @ lower.T)
    return _split((left @ u, s, v @ right.T), rank)


def _split(decomposed: tuple[np.ndarray, np.ndarray, np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    u, s, v = decomposed
    a, b = v[:rank].astype(np.float32), (u[:, :rank] * s[:rank]).astype(np.float32)
    return _pad_rank(a, b, rank)


def _pad_rank(a: np.ndarray, b: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    missing = rank - a.shape[0]
    return np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))


def _mix_arrays(
    arrays: list[np.ndarray],
    weights: Sequence[float],
    method: str,
    density: float,
    majority: str,
    draw: np.random.Generator | None,
) -> np.ndarray:
    pruning, sum_rule = PARTS[method]
    if pruning == "largest" and density < 1:
        arrays = [_largest(array, density) for array in arrays]
    elif pruning == "random" and density < 1:
        assert draw is not None, "what is dropped at random needs a source of random numbers"
        arrays = [array * (draw.random(array.shape) < density) / np.float32(density) for array in arrays]
    stack = np.stack(arrays)
    scaled = stack * np.asarray(weights, np.float32)[:, None, None]
    if sum_rule == "sum":
        return scaled.sum(axis=0, dtype=np.float32)
    votes = stack.sum(axis=0) if majority == "total" else np.sign(stack).sum(axis=0)
    agreeing = np.sign(stack) == np.where(votes >= 0, 1, -1)
    return (scaled * agreeing).sum(axis=0, dtype=np.float32) / np.maximum(agreeing.sum(axis=0), 1).astype(np.float32)


def _largest(array: np.ndarray, density: float) -> np.ndarray:
    """The array with all but its largest numbers, the share `density` of them, set to zero."""
    count = int(density * array.size)
    pruned = np.zeros(array.size, array.dtype)
    chosen = np.argpartition(np.abs(array).ravel(), array.size - count)[array.size - count :] if count else []
    pruned[chosen] = array.ravel()[chosen]
    return pruned.reshape(array.shape)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)
