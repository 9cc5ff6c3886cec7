"""Which evaluation is the best so far, and when it is no use to go on."""

from __future__ import annotations

import dataclasses

from meshtune.train.checkpoint.checkpoints import Best


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """State after some evaluations: the best one, and how many came since without improving on it.

    `patience` None never stops. A loss improves if it is lower than the best by more than `min_delta`.
    """

    patience: int | None = None
    min_delta: float = 0.0
    best: Best | None = None
    stale: int = 0

    def after(self, step: int, loss: float) -> EarlyStopping:
        """The state after an evaluation; a loss that is not a number is never an improvement."""
        if loss < (self.best.loss - self.min_delta if self.best else float("inf")):
            return dataclasses.replace(self, best=Best(step, loss), stale=0)
        return dataclasses.replace(self, stale=self.stale + 1)

    @property
    def stop(self) -> bool:
        """Whether the run should end here."""
        return self.patience is not None and self.stale >= self.patience
