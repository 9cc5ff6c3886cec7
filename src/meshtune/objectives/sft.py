"""Supervised fine-tuning: weighted next-token cross-entropy."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from meshtune.kernels.cross_entropy import cross_entropy
from meshtune.model.compute import Compute
from meshtune.model.decoder import head_logits, head_params, hidden_states
from meshtune.model.in_use import loss_split
from meshtune.model.spec import ModelSpec
from meshtune.model.tree import Tree
from meshtune.objectives.score import Batch, Score


def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
    """-log p(target) times the target's weight, summed. Metric: accuracy, the weight of targets predicted first."""
    hidden = hidden_states(params, spec, compute, batch["tokens"], batch["positions"], batch["segment_ids"], rng=rng)
    head, weights = head_params(params, spec), batch["weights"]
    split = loss_split(head, spec, compute.layout, weights.shape)
    loss, correct = cross_entropy(
        head_logits, head, hidden, batch["targets"], weights, chunk=compute.loss_chunk, split=split
    )
    return Score(loss, jnp.sum(weights), {"accuracy": correct})
