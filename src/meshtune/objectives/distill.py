"""Distillation: the student's predictions are brought to the teacher's, token by token, over the whole vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.kernels.divergence import NamedTokens, divergence, named_tokens
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_params
from meshtune.model.gather import loss_sharding
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Batch, LossSums, Objective, logits_of
from meshtune.objectives.config import TEACHER, DistillConfig


def make(config: DistillConfig, teacher: ModelSpec | None = None) -> Objective:
    """The sum of the divergences from the teacher of the targets' predictions, times the targets' weights.

    The teacher is params["teacher"]; without its spec it is a server, which gave `named_ids` and `named_log_probs` to
    the batch. The metric `agreement` is the weight of targets for which both models have the same likeliest token.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        inputs, weights = inputs_of(batch), batch["weights"]
        hidden, _, sums = forward(params, spec, compute, inputs, rng=rng)
        head, heads = head_params(params, spec, hidden), [logits_of(spec, config.temperature)]
        sharding = None
        if compute.layout is not None:
            sharding = loss_sharding(head, spec, compute.layout, weights.shape)
        if teacher is None:
            predictions, teacher_head = NamedTokens(batch["named_ids"], batch["named_log_probs"]), {}
            heads.append(named_tokens)
        else:
            frozen = jax.tree.map(jax.lax.stop_gradient, params[TEACHER])
            predictions = jax.lax.stop_gradient(forward(frozen, teacher, compute, inputs)[0])
            teacher_head = head_params(frozen, teacher, predictions)
            heads.append(logits_of(teacher, config.temperature))
            if sharding is not None and compute.layout is not None:
                other = loss_sharding(teacher_head, teacher, compute.layout, weights.shape)
                assert sharding.vocab == other.vocab, "both vocabularies have the same size"
                sharding = dataclasses.replace(sharding, head=sharding.head + other.head)
        loss, equal = divergence(
            (heads[0], heads[1]),
            head,
            teacher_head,
            hidden,
            predictions,
            weights,
            beta=config.interpolation,
            chunk=compute.loss_chunk,
            sharding=sharding,
        )
        return LossSums(loss, jnp.sum(weights), {"agreement": equal}, sums)

    return objective
