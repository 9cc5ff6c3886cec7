"""The count of requests under way, which tells a process that is to end when it may."""

from __future__ import annotations

import time

DRAIN_SECONDS = 30.0  # for requests under way when the process is asked to end


class Gate:
    """Counts the requests under way, and is closed to new ones when the process is to end."""

    def __init__(self):
        self.closed, self.under_way = False, 0
        self._deadline = 0.0

    def close(self, seconds: float = DRAIN_SECONDS) -> None:
        """Lets no further request in; those under way have these seconds."""
        self.closed, self._deadline = True, time.monotonic() + seconds

    @property
    def drained(self) -> bool:
        """Whether it is closed and nothing is under way, or the time is over."""
        return self.closed and (self.under_way == 0 or time.monotonic() > self._deadline)
