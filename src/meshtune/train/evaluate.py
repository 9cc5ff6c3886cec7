"""Loss over validation data: sums over all of it, divided once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax
import numpy as np

from meshtune.errors import UserError
from meshtune.model.tree import Tree
from meshtune.objectives.score import Batch, Score


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over all supervised tokens (each by its weight)."""

    loss: float
    metrics: dict[str, float]
    weight: float


def evaluate(
    step: Callable[[Tree, Tree, Batch], Score],
    trainable: Tree,
    frozen: Tree,
    batches: Iterable[dict[str, np.ndarray]],
    place: Callable[[dict[str, np.ndarray]], Batch] = dict,
) -> Evaluation:
    """The weighted mean over batches of [A, B, T] arrays; every sum is added in float64 on the host.

    `place` puts a micro-batch of [B, T] arrays on the devices.

    Raises: UserError if the validation data have nothing to learn.
    """
    loss = weight = 0.0
    sums: dict[str, float] = {}
    for arrays in batches:
        for number in range(arrays["tokens"].shape[0]):
            score = jax.device_get(
                step(trainable, frozen, place({name: array[number] for name, array in arrays.items()}))
            )
            loss, weight = loss + float(score.loss), weight + float(score.weight)
            for name, value in score.metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    if not weight:
        raise UserError("there is nothing to learn anywhere in the validation data", where="data.validation")
    return Evaluation(loss / weight, {name: value / weight for name, value in sums.items()}, weight)
