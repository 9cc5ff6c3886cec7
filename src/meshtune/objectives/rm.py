"""Reward models, trained to score the better of two answers higher (Bradley and Terry 1952;
https://arxiv.org/abs/2203.02155)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.block import Hidden, Sums
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.gather import to_device
from meshtune.model.inputs import inputs_of
from meshtune.model.linear import linear
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Batch, LossSums, Objective, by_side, max_segments, segment_sum
from meshtune.objectives.config import RmConfig
from meshtune.objectives.preference import masked_sum, reward_metrics


def make(config: RmConfig) -> Objective:
    """The mean over pairs of -log sigmoid(chosen - rejected - margin), with scores read at each answer's last token.

    The margin is that of the record, which may say how much better the chosen answer is
    (https://arxiv.org/abs/2307.09288), or 0.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        values, layers = segment_scores(params, spec, compute, batch, rng)
        chosen, rejected = by_side(values)
        unit_mask = batch["units"]
        losses = -jax.nn.log_sigmoid(chosen - rejected - batch["values"])
        if config.centre:
            losses = losses + config.centre * (chosen + rejected) ** 2
        per_pair = reward_metrics(*map(jax.lax.stop_gradient, (chosen, rejected)))
        metrics = {name: masked_sum(values, unit_mask) for name, values in per_pair.items()}
        return LossSums(masked_sum(losses, unit_mask), jnp.sum(unit_mask), metrics, layers)

    return objective


def segment_scores(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None
) -> tuple[Float[Array, "B S"], Sums]:
    """The score of every segment, read at its only token with a weight above 0, and the layers' sums."""
    inputs = inputs_of(batch)
    hidden, _, sums = forward(params, spec, compute, inputs, rng=rng)
    token_scores = jnp.where(batch["weights"] > 0, scores(params, hidden), 0.0)
    return segment_sum(token_scores, batch["segment_ids"], max_segments(batch)), sums


def scores(params: Tree, hidden: Hidden) -> Float[Array, "B T"]:
    """The float32 score that a model with a head of one score (ModelSpec.scored) gives at every token."""
    return linear(hidden, to_device(params["score"]), out=jnp.float32)[..., 0]
