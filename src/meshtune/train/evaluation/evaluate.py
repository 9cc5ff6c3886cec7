"""Evaluates the loss on validation data, as one quotient of sums over all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch, Score, WeightedMetric, with_layers


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Weighted means over all supervised tokens, or over pairs or answers if the objective counts those."""

    loss: float
    metrics: dict[str, float]
    weight: float


def evaluate(
    step: Callable[[Tree, Tree, Batch], Score],
    spec: ModelSpec,
    trainable: Tree,
    frozen: Tree,
    batches: Iterable[dict[str, np.ndarray]],
    place: Callable[[dict[str, np.ndarray]], Batch] = dict,
) -> Evaluation:
    """Returns the weighted means over batches of [A, B, T] arrays; sums are accumulated in float64 on the host.

    The losses of the layers of the model `spec`, such as that of the load of experts, are computed from their sums over
    all batches, so that they do not depend on how the data are split.

    `place` puts a micro-batch of [B, T] arrays on the devices.

    Raises: UserError if the validation data contain no supervised token.
    """
    total: Score | None = None
    for arrays in batches:
        for number in range(arrays["tokens"].shape[0]):
            placed = place({name: array[number] for name, array in arrays.items()})
            score = jax.tree.map(np.float64, jax.device_get(step(trainable, frozen, placed)))
            total = score if total is None else jax.tree.map(np.add, total, score)
    weight = 0.0 if total is None else float(total.weight)
    if total is None or not weight:
        raise UserError("there is nothing to learn anywhere in the validation data", where="data.validation")
    total = with_layers(spec, total)
    metrics = {name: _mean(metric, weight) for name, metric in total.metrics.items()}
    return Evaluation(float(total.loss) / weight, metrics, weight)


def _mean(metric: Any, weight: float) -> float:
    """Divides a sum by its weight; 0 if the weight is 0."""
    sum_, divisor = metric if isinstance(metric, WeightedMetric) else (metric, weight)
    return float(sum_) / (float(divisor) or 1.0)
