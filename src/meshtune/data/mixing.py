"""How the records of several sources are mixed.

- concat: every source once, in sequence. With weights the total stays the same and each source gets its share of it: a
  source smaller than its share is repeated (whole passes, then a random part), a larger one is subsampled (without
  replacement, in its own order).
- interleave_under: the source of each document is drawn by weight (equal weights by default) and gives its next record,
  until the first source is exhausted. No record appears twice.
- interleave_over: the same until every source is exhausted; one that ends early restarts from its first record.

Weights are relative to each other. Caps apply first: they limit the records of a source, not its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshtune.errors import UserError, nearest

STRATEGIES = ("concat", "interleave_under", "interleave_over")
STREAM = 0x6D6978  # makes draws independent of others with the same seed
BLOCK = 1 << 16  # draws at a time


def mix(
    lengths: Sequence[int], weights: Sequence[float | None], strategy: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The source int32 [n] and the position in that source int64 [n] of every document of the mixture.

    A pure function of its arguments. Raises UserError for an unknown strategy, and where some sources have a weight and
    others do not; ValueError for a source without records.
    """
    set_weights = [weight for weight in weights if weight is not None]
    _check_mixture(lengths, weights, strategy)
    if strategy == "concat" and not set_weights:
        source = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return source, np.concatenate([np.arange(length) for length in lengths])
    rng = np.random.default_rng([seed, STREAM])
    share = np.array(set_weights or [1.0] * len(lengths), np.float64)
    share /= share.sum()
    if strategy == "concat":
        return _concat(np.array(lengths), share, rng)
    return _interleave(np.array(lengths), share, rng, until_all=strategy == "interleave_over")


def _check_mixture(lengths: Sequence[int], weights: Sequence[float | None], strategy: str) -> None:
    if strategy not in STRATEGIES:
        fix = f"{nearest(strategy, STRATEGIES)}{', '.join(STRATEGIES)}"
        raise UserError(f"unknown mixing '{strategy}'", where="data.mixing", fix=fix)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"sources to mix need at least one record each, got lengths {list(lengths)}")
    if None in weights and any(weight is not None for weight in weights):
        problem, where = "some sources have a weight and others do not", f"data.train[{weights.index(None)}].weight"
        raise UserError(problem, where=where, fix="give every source a weight, or none of them")


def _concat(lengths: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    counts = np.maximum(apportion(int(lengths.sum()), share), 1)
    parts = [draw(int(length), int(count), rng) for length, count in zip(lengths, counts, strict=True)]
    return np.repeat(np.arange(len(parts), dtype=np.int32), counts), np.concatenate(parts)


def draw(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` indices below `length`, int64: whole passes, then some drawn without replacement, each in order."""
    passes, remainder = divmod(count, length)
    drawn = np.sort(rng.permutation(length)[:remainder])
    return np.concatenate([np.tile(np.arange(length), passes), drawn]).astype(np.int64)


def apportion(total: int, share: np.ndarray) -> np.ndarray:
    """Integers that sum to `total`, in proportion to `share` (which sums to 1), by largest remainders (Hamilton)."""
    exact = total * share
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")
    counts[largest[: total - int(counts.sum())]] += 1
    return counts


def _interleave(
    lengths: np.ndarray, share: np.ndarray, rng: np.random.Generator, *, until_all: bool
) -> tuple[np.ndarray, np.ndarray]:
    blocks: list[np.ndarray] = []
    used = np.zeros(len(lengths), np.int64)
    records: list[np.ndarray] = []
    while True:
        drawn = rng.choice(len(lengths), size=BLOCK, p=share).astype(np.int32)
        record = np.empty(BLOCK, np.int64)
        ends = np.full(len(lengths), BLOCK + 1)  # draws of this block after which each source is exhausted
        for source, length in enumerate(lengths):
            turns = np.flatnonzero(drawn == source)
            record[turns] = (used[source] + np.arange(len(turns))) % length
            remaining = length - used[source]
            if remaining <= 0:
                ends[source] = 0
            elif remaining <= len(turns):
                ends[source] = turns[remaining - 1] + 1
            used[source] += len(turns)
        stop = int(ends.max() if until_all else ends.min())
        blocks.append(drawn[:stop])
        records.append(record[:stop])
        if stop <= BLOCK:
            return np.concatenate(blocks), np.concatenate(records)
