"""Reward models: the better of two answers gets the higher score (Bradley and Terry 1952;
https://arxiv.org/abs/2203.02155)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.decoder import hidden_states, scores
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import pairs
from meshtune.objectives.score import Batch, Objective, Score
from meshtune.objectives.segments import slots, totals


@dataclasses.dataclass(frozen=True)
class RmConfig:
    """`centre` weighs the square of the sum of both scores, which keeps them near zero
    (https://arxiv.org/abs/2312.09244)."""

    centre: float = 0.0


def make(config: RmConfig) -> Objective:
    """The mean over pairs of -log sigmoid(chosen - rejected - margin), scores being read at each answer's last token.

    The margin is the pair's own, where the data say how much better the chosen answer is
    (https://arxiv.org/abs/2307.09288); else 0.
    """

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        chosen, rejected = pairs(segment_scores(params, spec, compute, batch, rng))
        there = batch["units"]
        losses = -jax.nn.log_sigmoid(chosen - rejected - batch["values"])
        if config.centre:
            losses = losses + config.centre * (chosen + rejected) ** 2
        watched = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        }
        metrics = {name: jnp.sum(jnp.where(there > 0, jax.lax.stop_gradient(x), 0.0)) for name, x in watched.items()}
        return Score(jnp.sum(jnp.where(there > 0, losses, 0.0)), jnp.sum(there), metrics)

    return score


def segment_scores(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None
) -> Float[Array, "B S"]:
    """The score of every segment, at the one token of it that has a weight."""
    hidden = hidden_states(params, spec, compute, batch["tokens"], batch["positions"], batch["segment_ids"], rng=rng)
    each = scores(params, hidden)
    return totals(jnp.where(batch["weights"] > 0, each, 0.0), batch["segment_ids"], slots(batch))
