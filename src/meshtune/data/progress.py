"""Progress of preparing data, as a line with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(activity, documents done, documents in all)"""

_SETTLED = 2.0  # seconds of an activity after which its rate is meaningful


class ProgressClock:
    """Estimates the time left of an activity from its rate since it was first reported; `now` returns seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._activity = ""
        self._start, self._first = 0.0, 0

    def line(self, activity: str, done: int, of: int) -> str:
        """`tokenising train data: 2,048 of 8,192, 0:45 left`; without a time until the rate is known."""
        now = self._now()
        if activity != self._activity:
            self._activity, self._start, self._first = activity, now, done
        text, elapsed = f"{activity}: {done:,} of {of:,}", now - self._start
        if elapsed < _SETTLED or done <= self._first or done >= of:
            return text
        minutes, seconds = divmod(round(elapsed * (of - done) / (done - self._first)), 60)
        return f"{text}, {minutes}:{seconds:02} left"
