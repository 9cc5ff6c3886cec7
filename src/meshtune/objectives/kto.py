"""Kahneman-Tversky optimisation from single answers labelled good or bad (https://arxiv.org/abs/2402.01306)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answers, reference
from meshtune.objectives.score import Batch, Objective, Part, Score


@dataclasses.dataclass(frozen=True)
class KtoConfig:
    """The weights are those of answers labelled good and bad: (good * desirable) / (bad * undesirable) should lie
    between 1 and 4/3."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


def make(config: KtoConfig) -> Objective:
    """The mean over examples of weight * (1 - sigmoid(+-beta * (log-ratio - KL))).

    A unit is an example and, as its second segment, its prompt with another example's answer. The baseline KL is the
    mean log-ratio of the second segments of a micro-batch, over all devices, or 0 where that is negative; no gradient
    flows through it. Examples of different micro-batches do not meet in it.
    """
    beta = config.beta

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        mine = answers(params, spec, compute, batch, rng)
        first, second = reference(params, spec, compute, batch)
        there, good = mine.there, batch["values"] > 0
        count = jnp.sum(there)
        apart = jax.lax.stop_gradient(jnp.sum(jnp.where(there > 0, mine.second - second, 0.0)))
        kl = jnp.maximum(apart / jnp.where(count > 0, count, 1.0), 0.0)
        ratios = mine.first - first
        losses = jnp.where(
            good,
            config.desirable_weight * jax.nn.sigmoid(-beta * (ratios - kl)),
            config.undesirable_weight * jax.nn.sigmoid(beta * (ratios - kl)),
        )
        rewards = beta * jax.lax.stop_gradient(ratios)

        def over(which: Array, each: Array) -> Part:
            chosen = jnp.where(which, there, 0.0)
            return Part(jnp.sum(jnp.where(chosen > 0, jax.lax.stop_gradient(each), 0.0)), jnp.sum(chosen))

        metrics: dict[str, Array | Part] = {
            "rewards/chosen": over(good, rewards),
            "rewards/rejected": over(~good, rewards),
            "logps/chosen": over(good, mine.first),
            "logps/rejected": over(~good, mine.first),
            "kl": kl * count,
        }
        return Score(jnp.sum(jnp.where(there > 0, losses, 0.0)), count, metrics)

    return score
