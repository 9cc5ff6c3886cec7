"""The outcome of a run."""

from __future__ import annotations

import dataclasses
import pathlib

from meshtune.train.checkpoint.checkpoints import Best


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a run.

    `steps` of `total` updates were completed. `loss` is that of the last update, `smoothed_loss` the exponential mean
    that progress and plot show (train.report.smoothing), and `eval_loss` that of the last evaluation, None if this
    process ran none. `path` is the adapter or model, None if the run was interrupted; `interrupted` is then the number
    of the signal.
    """

    output: pathlib.Path
    steps: int
    total: int
    loss: float | None
    eval_loss: float | None
    best: Best | None
    path: pathlib.Path | None
    seconds: float
    interrupted: int | None = None
    smoothed_loss: float | None = None
