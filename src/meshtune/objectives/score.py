"""The shape of every loss: a sum and a weight, never a mean, so that splitting a batch cannot change the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

Batch = dict[str, Array]
"""tokens, targets, positions, segment_ids int32 [B, T]; weights float32 [B, T].

Stages that compare documents have more, all float32 (U units a row of two neighbouring segments each: unit u is
segments 2u + 1 and 2u + 2): units [B, U], 1 where there is one; values [B, U], a pair's margin or an example's label;
and, where they are asked for, reference [B, 2U], the reference's log-probability of every segment, and nll [B, T], the
weight of every target in a term of plain cross-entropy, all of an update's adding up to its number of units.
"""


class Part(NamedTuple):
    """A metric with a weight of its own, such as the mean over chosen answers alone."""

    sum: Float[Array, ""]
    weight: Float[Array, ""]


class Score(NamedTuple):
    """Sums over a batch, float32 scalars. The loss to report and to differentiate is `loss / weight`, divided once,
    after all micro-batches, devices and processes are added up; each metric is divided by `weight` as well, or by its
    own weight where it is a Part."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    metrics: Mapping[str, Float[Array, ""] | Part]


class Objective(Protocol):
    def __call__(self, params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score: ...


def means(score: Score) -> dict[str, Float[Array, ""]]:
    """Every metric of summed scores as a mean; 0 where there was nothing to be averaged."""

    def mean(sum: Array, weight: Array) -> Array:
        return sum / jnp.where(weight > 0, weight, 1.0)

    return {
        name: mean(*metric) if isinstance(metric, Part) else mean(metric, score.weight)
        for name, metric in score.metrics.items()
    }
