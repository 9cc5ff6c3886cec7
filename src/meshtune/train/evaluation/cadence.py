"""Schedules of evaluation, sampling and saving, by update number alone: a resumed run repeats them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

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


def save_interval(interval: int | None, total: int) -> int:
    """Returns the updates between saves; by default a run saves about ten times."""
    return interval or max(1, math.ceil(total / 10))
