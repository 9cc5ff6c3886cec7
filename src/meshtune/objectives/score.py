"""The result of every objective: a sum and a weight, never a mean, so that splitting a batch cannot change it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.block import Sums
from meshtune.model.compute import Compute
from meshtune.model.decoder import head_logits
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import layers_result

Batch = dict[str, Array]
"""tokens, targets, positions, segment_ids int32 [B, T]; weights float32 [B, T].

Stages that compare answers have further float32 arrays. A unit is n neighbouring segments of a row, two for pairs: unit
u is segments nu + 1 to nu + n, and a row has at most U units. `units` [B, U] is 1 where a unit exists; `values` [B, U]
is the margin of a pair or the label of an answer. Where needed, `reference` [B, nU] is the reference model's
log-probability of every segment, and `nll` [B, T] the weight of every target in a term of plain cross-entropy; the
weights of one update add up to its number of units.
"""


class WeightedMetric(NamedTuple):
    """A metric with its own weight, such as a mean over only the chosen answers."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


NO_SUMS: Sums = {}


class Score(NamedTuple):
    """Sums over a batch, as float32 scalars.

    The loss to report and to differentiate is `loss / weight`, divided once after all micro-batches, devices and
    processes are summed. Metrics are divided by `weight` too, except a WeightedMetric, which is divided by its own.
    `layers` are the sums of the model's layers; `with_layers` adds their share of the loss.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    metrics: Mapping[str, Float[Array, ""] | WeightedMetric]
    layers: Sums = NO_SUMS


class Objective(Protocol):
    """Computes the Score of one micro-batch. `rng` is None where nothing is random, as in evaluation."""

    def __call__(self, params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score: ...


@functools.cache
def logits_of(spec: ModelSpec) -> Callable[[Tree, Array], Array]:
    """`head_logits` of a model, always the same function for the same spec."""
    return functools.partial(head_logits, spec=dataclasses.replace(spec, stacks=()))


def with_layers(spec: ModelSpec, score: Score) -> Score:
    """The score with what its layers' sums add to the mean loss, the metric `aux_loss`, and the layers' own metrics."""
    if not score.layers:
        return score
    result = layers_result(spec, score.layers)
    metrics = {**score.metrics, **{name: WeightedMetric(*metric) for name, metric in result.metrics.items()}}
    if result.loss is None:
        return Score(score.loss, score.weight, metrics)
    loss = result.loss * score.weight
    return Score(score.loss + loss, score.weight, {**metrics, "aux_loss": jax.lax.stop_gradient(loss)})


def metric_means(score: Score) -> dict[str, Float[Array, ""]]:
    """Every metric of summed scores as a mean; 0 where its weight is 0."""

    def mean(total: Array, weight: Array) -> Array:
        return total / jnp.where(weight > 0, weight, 1.0)

    return {
        name: mean(*metric) if isinstance(metric, WeightedMetric) else mean(metric, score.weight)
        for name, metric in score.metrics.items()
    }
