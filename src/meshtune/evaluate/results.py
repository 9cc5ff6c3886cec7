"""The results of an evaluation: those of a task with every sample, and averages over the subjects of a benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshtune.evaluate.subjects import CATEGORIES

Value = float | tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example: its id in the task, the prompt, the right answer, the model's, and its part of each metric: a
    number, or (sum, weight) for a metric that is a ratio."""

    id: str
    prompt: str
    target: str
    answer: Any
    metrics: Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The metrics of a task, as fractions where they are shares, by name and filter ("acc,none")."""

    name: str
    benchmark: str
    category: str
    metrics: Mapping[str, float]
    samples: Sequence[Sample]
    higher_is_better: Mapping[str, bool] = dataclasses.field(default_factory=dict)


def averages(results: Sequence[TaskResult]) -> dict[str, dict[str, float]]:
    """The means over all samples of a benchmark's subjects, by category and in all: {"mmlu": {"acc, STEM": ..}}."""
    table: dict[str, dict[str, float]] = {}
    for benchmark in dict.fromkeys(result.benchmark for result in results if result.category):
        subjects = [result for result in results if result.benchmark == benchmark]
        for name in subjects[0].metrics:
            for category in ("Average", *CATEGORIES):
                counted = [result for result in subjects if category in ("Average", result.category)]
                values = [
                    sample.metrics[name] for result in counted for sample in result.samples if name in sample.metrics
                ]
                if values:
                    table.setdefault(benchmark, {})[f"{name.split(',')[0]}, {category}"] = float(
                        np.mean(np.asarray(values))
                    )
    return table
