"""Direct preference optimisation (https://arxiv.org/abs/2305.18290) and variants that use a reference model."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs, reference_log_probs
from meshtune.objectives.preference import hinge_loss, ipo_loss, preference_score, robust_loss, sigmoid_loss
from meshtune.objectives.score import Batch, Objective, Score


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """Options of DPO.

    `loss` is sigmoid (with `label_smoothing`: conservative DPO), hinge, ipo (on log-probabilities per token) or robust
    (with `label_smoothing` below 0.5). `ld_alpha` is the weight of tokens beyond the shorter answer's length
    (https://arxiv.org/abs/2409.06411); `sft_weight` is the weight of the chosen answers' cross-entropy.
    """

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
                "ipo averages over each answer's tokens, so there is no effect of length that ld_alpha could reduce",
                where="stage.ld_alpha",
                fix="leave ld_alpha out, or use loss sigmoid",
            )


def make(config: DpoConfig) -> Objective:
    """The mean over pairs of a loss on beta times the difference between the answers' log-ratios to the reference."""
    beta, smoothing = config.beta, config.label_smoothing

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        answers = answer_log_probs(params, spec, compute, batch, rng, tail=config.ld_alpha)
        reference = reference_log_probs(params, spec, compute, batch, tail=config.ld_alpha)
        chosen, rejected = answers.first - reference[0], answers.second - reference[1]
        logits = beta * (chosen - rejected)
        match config.loss:
            case "sigmoid":
                losses = sigmoid_loss(logits, smoothing)
            case "hinge":
                losses = hinge_loss(logits)
            case "ipo":
                losses = ipo_loss(chosen / answers.lengths[0] - rejected / answers.lengths[1], beta)
            case "robust":
                losses = robust_loss(logits, smoothing)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective
