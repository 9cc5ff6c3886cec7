"""Paired comparisons with intervals, and the overlap of questions with training data.

Where nothing differs but by chance, a verdict is wrong in at most 5% of cases: tests/evaluate/test_statistics.py
simulates it for 2 to 200 samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from meshtune.data.conversation import Conversation, Document, Labelled, Pair, Prompt, Sample
from meshtune.evaluate.metrics import WORD

RESAMPLES = 10_000
LEVEL = 0.98  # more than 95%, so that a verdict holds for skewed differences of few samples too
LIKELY = 0.05  # below it a McNemar test speaks of a difference
TINY = 1e-6  # of a value, and of a spread: no spread at all but for rounding
ENOUGH = 20  # samples; of fewer there is no verdict
TOO_FEW = "too few to say"
Verdict = Literal["gained", "lost", "same", "unclear", "too few to say"]

# A metric of many samples from the mean of theirs: sums over weights.
TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "word_perplexity": lambda mean: np.exp(-mean),
    "byte_perplexity": lambda mean: np.exp(-mean),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A metric before and after, the difference with its interval, and the verdict.

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

    The interval, of LEVEL, is the wider of two, one for differences that are symmetric and one for those that are not.
    A metric of TRANSFORMS has the interval of its mean, carried over at the value before.
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    assert first.shape == second.shape, "the samples are not the same"
    transform = TRANSFORMS.get(metric, lambda mean: mean)
    old, new = (pairs[:, 0].sum() / pairs[:, 1].sum() for pairs in (first, second))
    rng = np.random.default_rng(seed)
    intervals = np.array([_subset_interval(first, second, rng), _studentized_interval(first, second, rng)])
    ends = old + np.array([intervals[:, 0].min(), intervals[:, 1].max()])
    low, high = sorted(float(transform(end) - transform(old)) for end in ends)
    change = (second[:, 0] / second[:, 1] - first[:, 0] / first[:, 1]) * (1 if metric not in TRANSFORMS else -1)
    better = change > 0 if higher_is_better else change < 0
    worse = change < 0 if higher_is_better else change > 0
    wins, losses = int(better.sum()), int(worse.sum())
    binary = bool(np.isin(np.concatenate([first, second])[:, 0], (0.0, 1.0, 100.0)).all() and (first[:, 1] == 1).all())
    p = mcnemar(wins, losses) if binary else None
    if len(first) < ENOUGH:
        verdict: Verdict = TOO_FEW
    elif not wins and not losses:
        verdict = "same"
    elif low <= 0 <= high or (p is not None and p >= LIKELY):
        verdict = "unclear"
    else:
        verdict = "gained" if (low > 0) == higher_is_better else "lost"
    values = float(transform(old)), float(transform(new))
    return Difference(metric, *values, low, high, len(first), wins, losses, p, higher_is_better, verdict)


def _subset_interval(first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The interval of the differences of random subsets, each sample in it or not by a coin (Hartigan 1969).

    It leaves out 0 exactly where swapping the models within samples at random rarely gives as large a difference:
    right for any number of samples and any tails, where the models are as good as one another.
    """
    columns, count = np.concatenate([first, second], 1), len(first)
    coins = (rng.integers(0, 2, (rows, count), np.uint8).astype(np.float64) for rows in _chunks(count))
    sums = np.concatenate([chosen @ columns for chosen in coins])
    sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]
    return _quantiles(sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1])


def _studentized_interval(first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The studentised bootstrap interval of the difference, which follows a skewed distribution."""
    old, new = (pairs[:, 0].sum() / pairs[:, 1].sum() for pairs in (first, second))
    parts = [(pairs[:, 0] - mean * pairs[:, 1]) / pairs[:, 1].mean() for pairs, mean in ((first, old), (second, new))]
    deviations, count = parts[1] - parts[0], len(first)  # of each sample from the difference of all; their sum is 0
    spread = deviations.std()
    if spread <= TINY * max(abs(old), abs(new)):
        return np.full(2, new - old)
    draws = []
    for rows in _chunks(count):
        drawn = deviations[rng.integers(0, count, (rows, count), np.int32)]
        mean, variance = drawn.mean(1), np.square(drawn).mean(1)
        variance -= mean**2
        varied = variance > (TINY * spread) ** 2
        draws.append(mean[varied] / np.sqrt(variance[varied]))
    low, high = _quantiles(np.concatenate(draws))
    return new - old - spread * np.array([high, low])


def _chunks(count: int) -> list[int]:
    """RESAMPLES draws of `count` samples in parts that fit into little memory."""
    step = max(1, 2_000_000 // count)
    return [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]


def _quantiles(draws: np.ndarray) -> np.ndarray:
    return np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])


def mcnemar(wins: int, losses: int) -> float:
    """The exact two-sided probability that `wins` and `losses` are a split of as many fair coins, or a rarer one."""
    total, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(total, n) for n in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**total)) if total else 1.0


RUN_LENGTH = 13  # in a run, as in GPT-3's report (https://arxiv.org/abs/2005.14165)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Numbers of the evaluation's records: `copies` that training had whole, `shared` that have a run of RUN_LENGTH
    words in common with it, copies included, of `records`."""

    copies: list[int]
    shared: list[int]
    records: int

    @property
    def is_training_set(self) -> bool:
        """Whether every record was trained on."""
        return len(self.copies) == self.records

    def __str__(self) -> str:
        if self.is_training_set:
            return (
                f"THE EVALUATION DATA ARE TRAINING DATA: all {self.records} records were trained on. "
                "The numbers say how well they were learned by heart, and nothing of new questions."
            )
        share = len(self.shared) / self.records
        return (
            f"{len(self.copies)} of {self.records} records were trained on as they are, and {len(self.shared)} "
            f"({share:.0%}) have {RUN_LENGTH} words in a row in common with the training data."
        )


def overlap(evaluation: Sequence[Sample], training: Iterable[Sample]) -> Overlap:
    """The overlap of two sets of samples. Words are compared in lower case, without punctuation."""
    texts = [words_of(sample) for sample in evaluation]
    by_text: dict[bytes, list[int]] = {}
    by_run: dict[bytes, list[int]] = {}
    for number, text in enumerate(texts):
        by_text.setdefault(_hash(text), []).append(number)
        for run in _runs(text):
            by_run.setdefault(run, []).append(number)
    copies: set[int] = set()
    shared: set[int] = set()
    for sample in training:
        text = words_of(sample)
        copies.update(by_text.get(_hash(text), ()))
        for run in _runs(text):
            shared.update(by_run.get(run, ()))
    return Overlap(sorted(copies), sorted(shared | copies), len(texts))


def text_marks(sample: Sample) -> set[bytes]:
    """Hashes that a sample shares with those samples that `overlap` finds words in common with."""
    text = words_of(sample)
    return {_hash(text), *_runs(text)}


def words_of(sample: Sample) -> list[str]:
    """The words of all turns of a sample but a system prompt, which records share by intention; a picture is a word."""
    match sample:
        case Pair():
            return words_of(sample.chosen)
        case Labelled() | Prompt():
            return words_of(sample.document)
        case _:
            return [word.lower() for word in WORD.findall(_text(sample))]


def _text(document: Document) -> str:
    if isinstance(document, Conversation):
        words = [message.content for message in document.messages if message.role != "system"]
        return "\n".join([*words, *(picture.digest for picture in document.pictures)])
    return document.prompt + document.text


def _runs(tokens: Sequence[str]) -> Iterable[bytes]:
    return (_hash(tokens[start : start + RUN_LENGTH]) for start in range(len(tokens) - RUN_LENGTH + 1))


def _hash(tokens: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join(tokens).encode(), digest_size=12).digest()
