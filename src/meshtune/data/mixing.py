"""How several sources become one list of documents: index maps, computed once from lengths, weights and the seed.

- concat: every source once, one after the other. With weights the total stays the same and each source gets its share
  of it: a source smaller than its share is repeated (whole passes, then a drawn part), a larger one is thinned (drawn
  without replacement, in its own order).
- interleave_under: sources are drawn at random by weight (equal without), each giving its next record, until the first
  source is used up. No record appears twice.
- interleave_over: the same until every source has been used up; one that ends early starts again from its first record.

Weights count relative to each other. Caps are taken before: they bound the records of a source, not its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshtune.errors import UserError, nearest

STRATEGIES = ("concat", "interleave_under", "interleave_over")
STREAM = 0x6D6978  # keeps the draws of mixing apart from others made with the same seed
BLOCK = 1 << 16  # draws made at once


def mix(
    lengths: Sequence[int], weights: Sequence[float | None], strategy: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which source [n] int32, and which of its records [n] int64, each document of the mixture is.

    A pure function of its arguments. Raises UserError for an unknown strategy and where some sources have a weight and
    others none; ValueError for a source without records.
    """
    if strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise UserError(
            f"unknown mixing '{strategy}'", where="data.mixing", fix=f"{nearest(strategy, STRATEGIES)}{known}"
        )
    if not lengths or min(lengths) < 1:
        raise ValueError(f"every source needs records to be mixed, got lengths {list(lengths)}")
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(lengths):
        missing = next(index for index, weight in enumerate(weights) if weight is None)
        raise UserError(
            "some sources have a weight and some have none",
            where=f"data.train[{missing}].weight",
            fix="give every source a weight, or none of them",
        )
    rng = np.random.default_rng([seed, STREAM])
    share = np.array(given or [1.0] * len(lengths), np.float64)
    share /= share.sum()
    if strategy == "concat":
        parts = _concat(np.array(lengths), share if given else None, rng)
        source = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        return source, np.concatenate(parts)
    return _interleave(np.array(lengths), share, rng, all_of_them=strategy == "interleave_over")


def _concat(lengths: np.ndarray, share: np.ndarray | None, rng: np.random.Generator) -> list[np.ndarray]:
    if share is None:
        return [np.arange(length) for length in lengths]
    counts = np.maximum(apportion(int(lengths.sum()), share), 1)
    return [draw(int(length), int(count), rng) for length, count in zip(lengths, counts, strict=True)]


def draw(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` numbers below `length`, int64: whole passes, then a part drawn without replacement, each in order."""
    whole, rest = divmod(count, length)
    drawn = np.sort(rng.permutation(length)[:rest])
    return np.concatenate([np.tile(np.arange(length), whole), drawn]).astype(np.int64)


def apportion(total: int, share: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to `share` (which sums to 1) that sum to `total`: largest remainders (Hamilton)."""
    exact = total * share
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")
    counts[largest[: total - int(counts.sum())]] += 1
    return counts


def _interleave(
    lengths: np.ndarray, share: np.ndarray, rng: np.random.Generator, *, all_of_them: bool
) -> tuple[np.ndarray, np.ndarray]:
    blocks: list[np.ndarray] = []
    used = np.zeros(len(lengths), np.int64)
    records: list[np.ndarray] = []
    while True:
        drawn = rng.choice(len(lengths), size=BLOCK, p=share).astype(np.int32)
        record = np.empty(BLOCK, np.int64)
        ends = np.full(len(lengths), BLOCK + 1)  # how many draws of this block each source needs to be used up
        for source, length in enumerate(lengths):
            mine = np.flatnonzero(drawn == source)
            record[mine] = (used[source] + np.arange(len(mine))) % length
            left = length - used[source]
            if left <= 0:
                ends[source] = 0
            elif left <= len(mine):
                ends[source] = mine[left - 1] + 1
            used[source] += len(mine)
        stop = int(ends.max() if all_of_them else ends.min())
        blocks.append(drawn[:stop])
        records.append(record[:stop])
        if stop <= BLOCK:
            return np.concatenate(blocks), np.concatenate(records)
