"""What became of a run."""

from __future__ import annotations

import dataclasses
import pathlib

from meshtune.train.checkpoint.checkpoints import Best


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a run.

    `steps` updates of `total` are made; `loss` is that of the last one, `smoothed_loss` the mean that progress
    and plot show (train.report.smoothing), `eval_loss` that of the last evaluation (None if
    there was none in this process). `path` is the adapter or model, None if the run was interrupted; `interrupted` is
    then the signal's number.
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
