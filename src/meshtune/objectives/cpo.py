"""Contrastive preference optimisation, without a reference (https://arxiv.org/abs/2401.08417)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs
from meshtune.objectives.preference import hinge_loss, ipo_loss, preference_score, sigmoid_loss
from meshtune.objectives.score import Batch, Objective, Score


@dataclasses.dataclass(frozen=True)
class CpoConfig:
    """`loss` is sigmoid, hinge or ipo (on log-probabilities per token); `sft_weight` is the weight of the chosen
    answers' cross-entropy, the paper's behaviour cloning term."""

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
    """The mean over pairs of a loss on beta times the difference between the two answers' log-probabilities."""
    beta = config.beta

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        if config.loss == "ipo":
            per_token = answers.first / answers.lengths[0], answers.second / answers.lengths[1]
            answers = answers._replace(first=per_token[0], second=per_token[1])
        chosen, rejected = answers.first, answers.second
        match config.loss:
            case "sigmoid":
                losses = sigmoid_loss(beta * (chosen - rejected), config.label_smoothing)
            case "hinge":
                losses = hinge_loss(beta * (chosen - rejected))
            case "ipo":
                losses = ipo_loss(chosen - rejected, beta)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective
