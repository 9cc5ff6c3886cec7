"""The ways in which the coordinator reduces the values of all processes to a result for each of them.

Every message holds one value or one result, so that n processes send and receive n of each: nothing grows with the
square of n. Values are JSON; a function gets those of all processes, in order, and returns a result for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Results = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first process whose value is not that of process 0. `equal` processes agree with process 0."""

    process_index: int
    equal: int


def first(values: Sequence[Any]) -> Results:
    """[process, value] of the first that is not None, or None."""
    return [next(([index, value] for index, value in enumerate(values) if value is not None), None)] * len(values)


def gather(values: Sequence[Any]) -> Results:
    """All values for process 0, and None for the others."""
    return [values, *[None] * (len(values) - 1)]


def maximum(values: Sequence[Sequence[float]]) -> Results:
    """The highest number in each place of lists of equal length."""
    return [[max(numbers) for numbers in zip(*values, strict=True)]] * len(values)


def difference(values: Sequence[Any]) -> Results:
    """The fields of a Difference, or None where all values are equal."""
    index = next((index for index, value in enumerate(values) if value != values[0]), None)
    return [None if index is None else [index, values.count(values[0])]] * len(values)


def merge(values: Sequence[Mapping[str, Any]]) -> Results:
    """One mapping of all; the last process with a key decides."""
    return [{key: value for mapping in values for key, value in mapping.items()}] * len(values)


def rank(values: Sequence[str]) -> Results:
    """[the number of a process's text among the distinct ones, how many are distinct, whether no process before it has
    this text]."""
    numbers: dict[str, int] = {}
    ranks: list[tuple[int, bool]] = []
    for value in values:
        is_first = value not in numbers
        ranks.append((numbers.setdefault(value, len(numbers)), is_first))
    return [[number, len(numbers), is_first] for number, is_first in ranks]


REDUCTIONS: dict[str, Callable[[Sequence[Any]], Results]] = {
    reduction.__name__: reduction for reduction in (first, gather, maximum, difference, merge, rank)
}
