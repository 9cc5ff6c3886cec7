"""Ends a job that stands still: its processes live, and one does not reach the next update."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Iterator

from meshtune.mesh.processes import SINGLE_PROCESS, Job

RECENT = 50  # updates whose median time counts
FIRST = 3  # times as long as any other may the first update take


class Watchdog:
    """Ends the job where no update was reported for `seconds`, and for `factor` times the median time of an update.

    Every process writes the stacks of its threads to stderr and exits with 75. Process 0 decides, and names the process
    that got least far: each tells the coordinator how many steps of the loop it has taken. `seconds` None watches
    nothing. A context manager: it watches within the block.
    """

    def __init__(self, job: Job = SINGLE_PROCESS, *, factor: float = 1.0, seconds: float | None = None):
        self._job, self._factor, self._seconds = job, factor, seconds
        self._times: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._last, self._pauses, self._steps = time.monotonic(), 0, 0
        self._left = threading.Event()

    def __enter__(self) -> Watchdog:
        self._last = time.monotonic()
        if self._seconds is not None and self._job.is_main_process:
            threading.Thread(target=self._watch, name="meshtune-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    @property
    def limit(self) -> float:
        """Seconds without an update after which the job ends."""
        assert self._seconds is not None
        if not self._times:
            return FIRST * self._seconds
        return max(self._seconds, self._factor * statistics.median(self._times))

    def step(self) -> None:
        """Notes that this process's main thread has taken one more step of its loop."""
        self._steps += 1
        if self._job.client is not None:
            self._job.client.steps = self._steps

    def update(self) -> None:
        """Notes that an update has ended."""
        self.step()
        previous, self._last = self._last, time.monotonic()
        self._times.append(self._last - previous)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Watches nothing within the block: evaluations, samples and rollouts take as long as they take."""
        self._pauses += 1
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._pauses -= 1

    def _watch(self) -> None:
        while not self._left.wait(min(1.0, self.limit / 10)):
            waited = time.monotonic() - self._last
            if not self._pauses and waited > self.limit:
                self._end(waited)
                return

    def _end(self, waited: float) -> None:
        from meshtune.mesh.client import EXIT_PROCESS_LOST, STALLED, JobEnd  # the code of several processes

        usual = f", where one takes {statistics.median(self._times):.2g} s" if self._times else ""
        fix = "look at the stacks in its log; the same command with resume=true continues from the last checkpoint"
        coordinator = self._job.coordinator
        if coordinator is None:
            faulthandler.dump_traceback(2)
            os.write(2, f"error: no update for {waited:.0f} s{usual}\n  fix: {fix}\n".encode())
            os._exit(EXIT_PROCESS_LOST)
        index, host, behind = coordinator.least_steps()
        count = self._job.process_count
        where = (
            f"process {index} of {count} on {host} does not go on" if behind else f"none of {count} processes goes on"
        )
        coordinator.end(
            JobEnd(STALLED, f"{where}: no update for {waited:.0f} s{usual}", index, host, None, fix, EXIT_PROCESS_LOST)
        )
