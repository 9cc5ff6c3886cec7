"""Distillation: the student's predictions are brought to the teacher's, token by token, over the whole vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.kernels.divergence import divergence
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_params
from meshtune.model.gather import loss_sharding
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Batch, LossSums, Objective, logits_of
from meshtune.objectives.config import TEACHER, DistillConfig


def make(config: DistillConfig, teacher: ModelSpec) -> Objective:
    """The sum of the divergences from params["teacher"] of the targets' predictions, times the targets' weights.

    The metric `agreement` is the weight of targets for which both models have the same likeliest token.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        inputs, weights = inputs_of(batch), batch["weights"]
        hidden, _, sums = forward(params, spec, compute, inputs, rng=rng)
        frozen = jax.tree.map(jax.lax.stop_gradient, params[TEACHER])
        teacher_hidden = jax.lax.stop_gradient(forward(frozen, teacher, compute, inputs)[0])
        head, teacher_head = head_params(params, spec, hidden), head_params(frozen, teacher, teacher_hidden)
        sharding = None
        if compute.layout is not None:
            sharding, other = (
                loss_sharding(node, model, compute.layout, weights.shape)
                for node, model in ((head, spec), (teacher_head, teacher))
            )
            assert sharding.vocab == other.vocab, "both vocabularies have the same size"
            sharding = dataclasses.replace(sharding, head=sharding.head + other.head)
        loss, equal = divergence(
            (logits_of(spec, config.temperature), logits_of(teacher, config.temperature)),
            head,
            teacher_head,
            hidden,
            teacher_hidden,
            weights,
            beta=config.interpolation,
            chunk=compute.loss_chunk,
            sharding=sharding,
        )
        return LossSums(loss, jnp.sum(weights), {"agreement": equal}, sums)

    return objective
