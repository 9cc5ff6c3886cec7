"""Direct preference optimisation (https://arxiv.org/abs/2305.18290) and its relatives with a reference."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answers, reference
from meshtune.objectives.preference import hinge, robust, scored, smoothed, squared
from meshtune.objectives.score import Batch, Objective, Score


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """`loss` is sigmoid (with `label_smoothing`: conservative DPO), hinge, ipo (of log-probabilities per token) or
    robust (with `label_smoothing`, below 0.5). `ld_alpha` weighs tokens beyond the shorter answer's length
    (https://arxiv.org/abs/2409.06411); `sft_weight` is that of the chosen answers' cross-entropy."""

    beta: float = 0.1
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    label_smoothing: float = 0.0
    ld_alpha: float | None = None
    sft_weight: float = 0.0

    def __post_init__(self):
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise UserError(
                f"label_smoothing has no meaning for loss {self.loss}",
                where="stage.label_smoothing",
                fix="use loss sigmoid (conservative) or robust, or leave label_smoothing out",
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError("label_smoothing must be in [0, 0.5)", where="stage.label_smoothing", fix="such as 0.1")
        if self.ld_alpha is not None and self.loss == "ipo":
            raise UserError(
                "ipo takes the average over each answer, so its length has no weight that ld_alpha could change",
                where="stage.ld_alpha",
                fix="leave ld_alpha out, or use loss sigmoid",
            )


def make(config: DpoConfig) -> Objective:
    """The mean over pairs of a loss of beta times the difference of both answers' log-ratios to the reference."""
    beta, smoothing = config.beta, config.label_smoothing

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        mine = answers(params, spec, compute, batch, rng, tail=config.ld_alpha)
        first, second = reference(params, spec, compute, batch, tail=config.ld_alpha)
        chosen, rejected = mine.first - first, mine.second - second
        logits = beta * (chosen - rejected)
        match config.loss:
            case "sigmoid":
                losses = smoothed(logits, smoothing)
            case "hinge":
                losses = hinge(logits)
            case "ipo":
                losses = squared(chosen / mine.lengths[0] - rejected / mine.lengths[1], beta)
            case "robust":
                losses = robust(logits, smoothing)
        return scored(mine, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return score
