"""Groups a sequence of layers into repeating patterns, so that few different layers are compiled."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

WIDEST = 16  # layers of a pattern


class Run(NamedTuple):
    """A pattern of `width` items that comes `repeats` times."""

    width: int
    repeats: int


def shortest_first(items: Sequence[Hashable]) -> list[Run]:
    """The shortest pattern that repeats through all items, but for a rest that is grouped likewise; where there is
    none, runs of equal items."""
    n = len(items)
    for width in range(1, min(n // 2, WIDEST) + 1):
        covered = n // width * width
        if all(items[place] == items[place - width] for place in range(width, covered)):
            rest = items[covered:]
            return [Run(width, n // width), *(shortest_first(rest) if rest else ())]
    runs: list[Run] = []
    for place, item in enumerate(items):
        if runs and items[place - 1] == item:
            runs[-1] = Run(1, runs[-1].repeats + 1)
        else:
            runs.append(Run(1, 1))
    return runs


def fewest_bodies(items: Sequence[Hashable]) -> list[Run]:
    """The runs with the fewest items in all patterns together, and of these the fewest runs."""
    n = len(items)
    best: list[tuple[int, int, list[Run]]] = [(0, 0, [])] * (n + 1)
    for start in reversed(range(n)):
        candidates = []
        for width in range(1, min(n - start, WIDEST) + 1):
            repeats = 1
            while _same(items, start, start + width * repeats, width):
                repeats += 1
            for count in range(1, repeats + 1):
                bodies, runs, after = best[start + width * count]
                candidates.append((bodies + width, runs + 1, [Run(width, count), *after]))
        best[start] = min(candidates, key=lambda candidate: candidate[:2])
    return best[0][2]


def grouped(items: Sequence[Hashable]) -> list[Run]:
    """`shortest_first`, or `fewest_bodies` where that leaves out a quarter of what would be compiled."""
    simple, fewest = shortest_first(items), fewest_bodies(items)
    return fewest if 4 * _bodies(fewest) <= 3 * _bodies(simple) else simple


def _bodies(runs: Sequence[Run]) -> int:
    return sum(run.width for run in runs)


def _same(items: Sequence[Hashable], first: int, second: int, width: int) -> bool:
    return items[first : first + width] == items[second : second + width]
