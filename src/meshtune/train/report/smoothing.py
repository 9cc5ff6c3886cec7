"""The smoothed training loss, shared by progress bar, plot and summary."""

from __future__ import annotations

from collections.abc import Iterable

from meshtune.train.report.events import Event, Stepped

MAX_SPAN = 50.0  # updates
SHARE_OF_RUN = 1 / 20


class SmoothedLoss:
    """A sink that keeps the exponential moving average of the loss, over about a twentieth of the run.

    The span grows with the number of updates made, from 1 to its final length, so that the mean starts at the first
    loss and follows the fast decrease at the beginning of a run without lag. `history` holds the losses of the updates
    before a resume.
    """

    def __init__(self, total: int, history: Iterable[float] = ()):
        self.final_span = max(1.0, min(MAX_SPAN, total * SHARE_OF_RUN))
        self._count = 0
        self.value: float | None = None
        self.history = [self.update(loss) for loss in history]

    @property
    def span(self) -> float:
        """Approximate number of updates that the mean covers; 1 means that it equals the last loss."""
        return min(self.final_span, 1.0 + self._count / 4)

    def update(self, loss: float) -> float:
        """Adds the loss of one update and returns the new mean."""
        weight = 1.0 / self.span
        self.value = loss if self.value is None else self.value + weight * (loss - self.value)
        self._count += 1
        return self.value

    def receive(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.update(event.loss)

    def close(self) -> None:
        """Nothing to close."""
