"""Simple preference optimisation, without a reference (https://arxiv.org/abs/2405.14734)."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answers
from meshtune.objectives.preference import scored, smoothed
from meshtune.objectives.score import Batch, Objective, Score


@dataclasses.dataclass(frozen=True)
class SimpoConfig:
    """`gamma` is the margin by which a chosen answer's reward should win; the paper has gamma / beta near 0.5."""

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0
    sft_weight: float = 0.0


def make(config: SimpoConfig) -> Objective:
    """The mean over pairs of -log sigmoid(beta * difference of average log-probabilities - gamma)."""
    beta = config.beta

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        mine = answers(params, spec, compute, batch, rng)
        mine = mine._replace(first=mine.first / mine.lengths[0], second=mine.second / mine.lengths[1])
        losses = smoothed(beta * (mine.first - mine.second) - config.gamma, config.label_smoothing)
        return scored(mine, losses, (beta * mine.first, beta * mine.second), config.sft_weight)

    return score
