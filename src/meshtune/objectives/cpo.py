"""Contrastive preference optimisation, without a reference (https://arxiv.org/abs/2401.08417)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answers
from meshtune.objectives.preference import hinge, scored, smoothed, squared
from meshtune.objectives.score import Batch, Objective, Score


@dataclasses.dataclass(frozen=True)
class CpoConfig:
    """`loss` is sigmoid, hinge or ipo (of log-probabilities per token); `sft_weight` is the paper's behaviour cloning
    of the chosen answers."""

    beta: float = 0.1
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    sft_weight: float = 1.0

    def __post_init__(self):
        if self.label_smoothing and self.loss != "sigmoid":
            raise UserError(
                f"label_smoothing has no meaning for loss {self.loss}",
                where="stage.label_smoothing",
                fix="use loss sigmoid, or leave label_smoothing out",
            )


def make(config: CpoConfig) -> Objective:
    """The mean over pairs of a loss of beta times the difference of both answers' log-probabilities."""
    beta = config.beta

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        mine = answers(params, spec, compute, batch, rng)
        if config.loss == "ipo":
            mine = mine._replace(first=mine.first / mine.lengths[0], second=mine.second / mine.lengths[1])
        chosen, rejected = mine.first, mine.second
        match config.loss:
            case "sigmoid":
                losses = smoothed(beta * (chosen - rejected), config.label_smoothing)
            case "hinge":
                losses = hinge(beta * (chosen - rejected))
            case "ipo":
                losses = squared(chosen - rejected, beta)
        return scored(mine, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return score
