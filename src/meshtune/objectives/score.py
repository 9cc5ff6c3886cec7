"""The shape of every loss: a sum and a weight, never a mean, so that splitting a batch cannot change the result."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float

from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.model.tree import Tree

Batch = dict[str, Array]  # tokens, targets, positions, segment_ids int32 [B, T]; weights float32 [B, T]


class Score(NamedTuple):
    """Sums over a batch, float32 scalars. The loss to report and to differentiate is `loss / weight`, divided once,
    after all micro-batches, devices and processes are added up; each metric is divided by `weight` as well."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]


class Objective(Protocol):
    def __call__(self, params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score: ...
