"""Simple preference optimisation, without a reference (https://arxiv.org/abs/2405.14734)."""

from __future__ import annotations

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs
from meshtune.objectives.config import SimpoConfig
from meshtune.objectives.preference import preference_score, sigmoid_loss
from meshtune.objectives.score import Batch, Objective, Score


def make(config: SimpoConfig) -> Objective:
    """The mean over pairs of -log sigmoid(beta * difference of average log-probabilities - gamma)."""
    beta = config.beta

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        chosen, rejected = answers.first / answers.lengths[0], answers.second / answers.lengths[1]
        answers = answers._replace(first=chosen, second=rejected)
        losses = sigmoid_loss(beta * (chosen - rejected) - config.gamma, config.label_smoothing)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective
