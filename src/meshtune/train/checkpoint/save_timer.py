"""When to save by the clock: at a fixed interval, or at the one that loses least time to failures."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable

from meshtune.costs.goodput import best_interval

FIRST = 60.0  # seconds of updates before the first save at the latest, which shows what a save costs
ASSUMED_SAVE = 1.0  # seconds, until then
RECENT = 5  # saves whose median cost counts


@dataclasses.dataclass
class SaveTimer:
    """Decides when a save is due. `interval` is in seconds; None is the best one for `mtbf` seconds between failures,
    by what recent saves have cost. With neither no save is due by the clock."""

    interval: float | None = None
    mtbf: float | None = None

    def __post_init__(self) -> None:
        self._costs: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._last = time.monotonic()
        self._requested = False

    @property
    def save_seconds(self) -> float | None:
        """The median time for which recent saves kept the updates waiting."""
        return statistics.median(self._costs) if self._costs else None

    @property
    def seconds(self) -> float | None:
        """The time between saves now."""
        if self.interval is not None or self.mtbf is None:
            return self.interval
        if self.save_seconds is None:
            return min(FIRST, best_interval(ASSUMED_SAVE, self.mtbf))
        return best_interval(max(self.save_seconds, 1e-3), self.mtbf)

    def request(self, writing: Callable[[], bool]) -> bool:
        """Whether a save becomes due now; true once for each. None becomes due while one is `writing`."""
        seconds = self.seconds
        if seconds is None or self._requested or time.monotonic() - self._last < seconds or writing():
            return False
        self._requested = True
        return True

    def note_save(self, cost: float) -> None:
        """Notes that a save has begun, which kept the updates waiting for `cost` seconds."""
        self._costs.append(cost)
        self._last, self._requested = time.monotonic(), False
