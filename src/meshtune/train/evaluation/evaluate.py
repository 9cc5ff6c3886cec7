"""Evaluation while training: when, how, and when it ends a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Batch, LossSums, WeightedMetric, with_layers
from meshtune.train.checkpoint.checkpoints import Best


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Weighted means over all supervised tokens, or over pairs or answers if the objective counts those."""

    loss: float
    metrics: dict[str, float]
    weight: float


def evaluate(
    step: Callable[[Tree, Tree, Batch], LossSums],
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
    total: LossSums | None = None
    for arrays in batches:
        for number in range(arrays["tokens"].shape[0]):
            placed = place({name: array[number] for name, array in arrays.items()})
            loss_sums = jax.tree.map(np.float64, jax.device_get(step(trainable, frozen, placed)))
            total = loss_sums if total is None else jax.tree.map(np.add, total, loss_sums)
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


Due = Callable[[int], bool]


@dataclasses.dataclass(frozen=True)
class Cadence:
    """The schedules of a run of `total` updates."""

    total: int
    evaluate: Due
    sample: Due
    save: Due


def at_interval(interval: int | None, total: int) -> Due:
    """Due every `interval` updates and after the last one; None: after the last one only."""
    return lambda step: step == total or (interval is not None and step > 0 and step % interval == 0)


def never(step: int) -> bool:
    """Never due."""
    return False


def evaluations(interval: int | Literal["epoch"] | None, total: int, place: Callable[[int], tuple[int, int]]) -> Due:
    """Each `interval` updates, or at the end of each epoch, and after the last update; None: never.

    `place(step)` tells the epoch of a batch and its number therein.
    """
    if interval is None:
        return never
    if interval == "epoch":
        return lambda step: step == total or (step > 0 and place(step)[1] == 0)
    return at_interval(interval, total)


def save_interval(interval: int | str | None, total: int) -> int | None:
    """Returns the updates between saves; by default a run saves about ten times. None for saves by the clock."""
    if isinstance(interval, str):
        return None
    return interval or max(1, math.ceil(total / 10))


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The best evaluation so far, and the number of evaluations since without improvement.

    With `patience` None a run never stops early. A loss improves if it is below the best by more than `min_delta`.
    """

    patience: int | None
    min_delta: float
    best: Best | None = None
    stale: int = 0

    def after(self, step: int, loss: float) -> EarlyStopping:
        """Returns the state after another evaluation; NaN is never an improvement."""
        if loss < (self.best.loss - self.min_delta if self.best else float("inf")):
            return dataclasses.replace(self, best=Best(step, loss), stale=0)
        return dataclasses.replace(self, stale=self.stale + 1)

    @property
    def stop(self) -> bool:
        """Whether the run should stop now."""
        return self.patience is not None and self.stale >= self.patience
