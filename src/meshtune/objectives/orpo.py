"""Odds ratio preference optimisation, without a reference (https://arxiv.org/abs/2403.07691)."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answers
from meshtune.objectives.preference import log_odds, scored
from meshtune.objectives.score import Batch, Objective, Score


@dataclasses.dataclass(frozen=True)
class OrpoConfig:
    """`beta` weighs the odds ratio beside the chosen answers' cross-entropy (the paper's lambda)."""

    beta: float = 0.1


def make(config: OrpoConfig) -> Objective:
    """Cross-entropy of the chosen answers, per token, and -beta log sigmoid of the log odds ratio, per pair."""

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        mine = answers(params, spec, compute, batch, rng)
        chosen, rejected = mine.first / mine.lengths[0], mine.second / mine.lengths[1]
        odds = log_odds(chosen, rejected)
        losses = -config.beta * jax.nn.log_sigmoid(odds)
        mine = mine._replace(first=chosen, second=rejected)
        return scored(mine, losses, (config.beta * chosen, config.beta * rejected), 1.0, log_odds=odds)

    return score
