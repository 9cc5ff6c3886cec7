"""Contrastive preference optimisation, without a reference (https://arxiv.org/abs/2401.08417)."""

from __future__ import annotations

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs
from meshtune.objectives.config import CpoConfig
from meshtune.objectives.preference import hinge_loss, ipo_loss, preference_score, sigmoid_loss
from meshtune.objectives.score import Batch, Objective, Score


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
