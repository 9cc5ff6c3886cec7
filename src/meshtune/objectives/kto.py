"""Kahneman-Tversky optimisation from single answers labelled good or bad (https://arxiv.org/abs/2402.01306)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import (
    Batch,
    LossSums,
    Objective,
    WeightedMetric,
    answer_log_probs,
    reference_log_probs,
)
from meshtune.objectives.config import KtoConfig
from meshtune.objectives.preference import masked_sum


def make(config: KtoConfig) -> Objective:
    """The mean over examples of weight * (1 - sigmoid(+-beta * (log-ratio - KL))).

    The first segment of a unit is an example, the second its prompt with the answer of another example. The KL baseline
    is the mean log-ratio of the second segments of a micro-batch, over all devices, clamped at 0; no gradient flows
    through it. Each micro-batch has its own baseline.
    """
    beta = config.beta

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        reference = reference_log_probs(params, spec, compute, batch)
        unit_mask, good = answers.unit_mask, batch["values"] > 0
        count = jnp.sum(unit_mask)
        kl_sum = jax.lax.stop_gradient(masked_sum(answers.second - reference[1], unit_mask))
        kl = jnp.maximum(kl_sum / jnp.where(count > 0, count, 1.0), 0.0)
        ratios = answers.first - reference[0]
        losses = jnp.where(
            good,
            config.desirable_weight * jax.nn.sigmoid(-beta * (ratios - kl)),
            config.undesirable_weight * jax.nn.sigmoid(beta * (ratios - kl)),
        )
        rewards = beta * jax.lax.stop_gradient(ratios)

        def mean_over(selected: Array, values: Array) -> WeightedMetric:
            mask = jnp.where(selected, unit_mask, 0.0)
            return WeightedMetric(masked_sum(jax.lax.stop_gradient(values), mask), jnp.sum(mask))

        metrics: dict[str, Array | WeightedMetric] = {
            "rewards/chosen": mean_over(good, rewards),
            "rewards/rejected": mean_over(~good, rewards),
            "logps/chosen": mean_over(good, answers.first),
            "logps/rejected": mean_over(~good, answers.first),
            "kl": kl * count,
        }
        return LossSums(masked_sum(losses, unit_mask), count, metrics, answers.layers)

    return objective
