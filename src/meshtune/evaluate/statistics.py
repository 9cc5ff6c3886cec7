"""Paired differences of two models on the same samples: bootstrap intervals, and McNemar's test of right and wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
LIKELY = 0.05  # below it a McNemar test speaks of a difference
Verdict = Literal["gained", "lost", "same", "unclear"]

# A metric of many samples from the mean of theirs: sums over weights.
TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "word_perplexity": lambda mean: np.exp(-mean),
    "byte_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A metric before and after, the difference with its bootstrap interval, and what that says.

    `wins` and `losses` count the samples that are better and worse than before; `p` is McNemar's exact two-sided
    probability of such a split by chance, of metrics that are right or wrong (None: others).
    """

    metric: str
    before: float
    after: float
    low: float
    high: float
    samples: int
    wins: int
    losses: int
    p: float | None
    higher_is_better: bool
    verdict: Verdict

    @property
    def change(self) -> float:
        """After less before."""
        return self.after - self.before


def difference(
    metric: str,
    before: Sequence[tuple[float, float]],
    after: Sequence[tuple[float, float]],
    *,
    higher_is_better: bool,
    seed: int = 0,
) -> Difference:
    """The paired difference of a metric whose samples are (sum, weight); the same samples in both.

    The interval is the percentile bootstrap of LEVEL over samples.
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    assert first.shape == second.shape, "the samples are not the same"
    transform = TRANSFORMS.get(metric, lambda mean: mean)
    old, new = (float(transform(pairs[:, 0].sum() / pairs[:, 1].sum())) for pairs in (first, second))
    draws = _resampled(first, second, transform, seed)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    change = (second[:, 0] / second[:, 1] - first[:, 0] / first[:, 1]) * (1 if metric not in TRANSFORMS else -1)
    better = change > 0 if higher_is_better else change < 0
    worse = change < 0 if higher_is_better else change > 0
    wins, losses = int(better.sum()), int(worse.sum())
    binary = bool(np.isin(np.concatenate([first, second])[:, 0], (0.0, 1.0, 100.0)).all() and (first[:, 1] == 1).all())
    p = mcnemar(wins, losses) if binary else None
    if not wins and not losses:
        verdict: Verdict = "same"
    elif low <= 0 <= high or (p is not None and p >= LIKELY):
        verdict = "unclear"
    else:
        verdict = "gained" if (low > 0) == higher_is_better else "lost"
    return Difference(metric, old, new, float(low), float(high), len(first), wins, losses, p, higher_is_better, verdict)


def _resampled(
    first: np.ndarray, second: np.ndarray, transform: Callable[[np.ndarray], np.ndarray], seed: int
) -> np.ndarray:
    """The differences of RESAMPLES draws of the samples, with replacement."""
    rng, count = np.random.default_rng(seed), len(first)
    step = max(1, 2_000_000 // count)
    parts = []
    for start in range(0, RESAMPLES, step):
        picked = rng.integers(0, count, (min(step, RESAMPLES - start), count))
        old, new = (transform(pairs[picked, 0].sum(1) / pairs[picked, 1].sum(1)) for pairs in (first, second))
        parts.append(new - old)
    return np.concatenate(parts)


def mcnemar(wins: int, losses: int) -> float:
    """The exact two-sided probability that `wins` and `losses` are a split of as many fair coins, or a rarer one."""
    total, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(total, n) for n in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**total)) if total else 1.0
