"""Plans which token runs are computed together, in arrays of which shape, by the cost of padding, calls and
compilations.

The unit of cost is the computation of one token through the layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

CACHED = 8  # slots of a cache for each token computed at once, at most
COPY = 1 / 16  # of a slot of a row's cache
ATTENTION = 1 / 3000  # of a slot, for every token that sees it
CALL = {"cpu": 64.0}  # of reading the weights once
OTHER_CALL = 256.0
STEP = {"cpu": 4}  # what lengths are multiples of
OTHER_STEP = 16  # of the tiles of matrix units
COMPILE = {"cpu": 1.5e11}  # of a program: the FLOPs that its seconds are worth
OTHER_COMPILE = 3e14


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of `length` tokens that ends at position `end` of its text."""

    length: int
    end: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The number of rows, of tokens in each, and of slots of their cache."""

    rows: int
    length: int
    slots: int

    @property
    def cost(self) -> float:
        """Of computing all of it, padding included."""
        return self.rows * (self.length * (1 + ATTENTION * self.slots) + COPY * self.slots)


@dataclasses.dataclass
class Planner:
    """Groups runs into shapes of at most `at_once` tokens; `compiled` are the shapes that need no compilation.

    `total` are the tokens of all runs to come; `call` and `compile` are the costs of a call and of a program,
    and lengths are multiples of `step`.
    """

    at_once: int
    total: int
    call: float
    compile: float
    step: int
    compiled: set[Shape] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, backend: str, parameters: int, at_once: int, total: int) -> Planner:
        """A planner for a model with this number of parameters: the more, the fewer tokens a compilation is worth."""
        cost = COMPILE.get(backend, OTHER_COMPILE) / (2 * max(1, parameters))
        return cls(at_once, total, CALL.get(backend, OTHER_CALL), cost, STEP.get(backend, OTHER_STEP))

    def groups(self, runs: Sequence[Run], slots_before: int) -> list[tuple[list[int], Shape]]:
        """The numbers of the runs that are computed at once, with their shape; no cache has fewer slots than before.

        Runs sorted by length are cut where the sum of all costs is least. A program that is new is expected to be of
        use to later groups too, the more the smaller a part of all runs these are.
        """
        tokens = max(self.at_once, sum(run.length for run in runs))
        compile = self.compile / math.sqrt(max(1, self.total / tokens))
        order = sorted(range(len(runs)), key=lambda n: (runs[n].length, runs[n].end))
        steps = [list(members) for _, members in itertools.groupby(order, lambda n: bucket(runs[n].length, self.step))]
        ends = [max(runs[n].end for n in members) for members in steps]
        best: list[tuple[float, int]] = [(0.0, 0)]  # (cost of the first n steps, where the last of their spans begins)
        for high in range(1, len(steps) + 1):
            length, count, end, options = bucket(runs[steps[high - 1][0]].length, self.step), 0, slots_before, []
            for low in range(high - 1, -1, -1):
                count, end = count + len(steps[low]), max(end, ends[low])
                span = self._span(count, length, end, compile)
                options.append((best[low][0] + self._cost(span, compile), low))
            best.append(min(options))
        groups, high = [], len(steps)
        while high:
            low = best[high][1]
            members = [n for step in steps[low:high] for n in step]
            end = max(slots_before, *ends[low:high])
            length = bucket(runs[members[-1]].length, self.step)
            for times, shape in self._span(len(members), length, end, compile):
                self.compiled.add(shape)
                for _ in range(times):
                    groups.append((members[-shape.rows :], shape))
                    members = members[: -shape.rows]
            assert not members
            high = low
        return groups

    def _span(self, count: int, length: int, slots: int, compile: float) -> list[tuple[int, Shape]]:
        """How often which shape is computed for `count` rows, the cheapest way: full ones, and one for what remains."""
        slots = bucket(slots, 32)
        row_limit = max(1, min(self.at_once // length, CACHED * self.at_once // slots))
        existing = [shape for shape in self.compiled if shape.length >= length and shape.slots >= slots]
        exact = {
            Shape(floor_bucket(min(row_limit, count)), length, slots),
            Shape(min(bucket(count, 1), row_limit), length, slots),
        }
        spans = []
        for full in (*exact, *existing):
            times, remaining = divmod(count, full.rows)
            span = [(times, full)] if times else []
            if remaining:
                remainders = [shape for shape in (*existing, full) if shape.rows >= remaining]
                remainders.append(Shape(min(bucket(remaining, 1), row_limit), length, slots))
                span.append((1, min(remainders, key=lambda shape: self._cost([*span, (1, shape)], compile))))
            spans.append(span)
        return min(spans, key=lambda span: (self._cost(span, compile), str(span)))

    def _cost(self, span: Sequence[tuple[int, Shape]], compile: float) -> float:
        new = {shape for _, shape in span} - self.compiled
        return sum(times * (shape.cost + self.call) for times, shape in span) + len(new) * compile


def bucket(n: int, least: int) -> int:
    """The next multiple of `least`, or of a larger power of two as long as that is at most a quarter more."""
    step = max(least, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def floor_bucket(n: int) -> int:
    """The largest of 1, 2, ..., 8, 10, 12, 14, 16, 20, ... that is not above `n`."""
    step = 1 << max(0, n.bit_length() - 3)
    return n // step * step
