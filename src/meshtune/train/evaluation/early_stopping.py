"""Tracks the best evaluation and decides when to stop a run without improvement."""

from __future__ import annotations

import dataclasses

from meshtune.train.checkpoint.checkpoints import Best


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """The best evaluation so far, and the number of evaluations since without improvement.

    With `patience` None a run never stops early. A loss improves if it is below the best by more than `min_delta`.
    """

    patience: int | None
    min_delta: float
    best: Best | None = None
    stale: int = 0

    def after(self, step: int, loss: float) -> EarlyStopping:
        """Returns the state after another evaluation; NaN is never an improvement."""
        if loss < (self.best.loss - self.min_delta if self.best else float("inf")):
            return dataclasses.replace(self, best=Best(step, loss), stale=0)
        return dataclasses.replace(self, stale=self.stale + 1)

    @property
    def stop(self) -> bool:
        """Whether the run should stop now."""
        return self.patience is not None and self.stale >= self.patience
