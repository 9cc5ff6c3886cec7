"""Odds ratio preference optimisation, without a reference (https://arxiv.org/abs/2403.07691)."""

from __future__ import annotations

import jax
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs
from meshtune.objectives.config import OrpoConfig
from meshtune.objectives.preference import log_odds, preference_score
from meshtune.objectives.score import Batch, Objective, Score


def make(config: OrpoConfig) -> Objective:
    """The chosen answers' cross-entropy per token, plus -beta log sigmoid(log odds ratio) per pair."""

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        chosen, rejected = answers.first / answers.lengths[0], answers.second / answers.lengths[1]
        odds = log_odds(chosen, rejected)
        losses = -config.beta * jax.nn.log_sigmoid(odds)
        answers = answers._replace(first=chosen, second=rejected)
        rewards = config.beta * chosen, config.beta * rejected
        return preference_score(answers, losses, rewards, sft_weight=1.0, log_odds=odds)

    return objective
