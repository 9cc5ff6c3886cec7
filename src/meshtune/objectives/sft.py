"""Supervised fine-tuning and continued pretraining: weighted next-token cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.kernels.cross_entropy import cross_entropy
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_params
from meshtune.model.gather import loss_sharding
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Batch, LossSums, Objective, logits_of, max_segments, segment_sum, to_tokens
from meshtune.objectives.config import SftConfig


def make(config: SftConfig) -> Objective:
    """The sum of -log p(target) times the target's weight, and with loss dft times p(target).

    The metric `accuracy` is the weight of targets that are the model's most likely token.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        perturb = None
        if config.neftune_alpha is not None and rng is not None:
            perturb = _embedding_noise(config.neftune_alpha, batch, jax.random.fold_in(rng, _NEFTUNE))
        inputs = inputs_of(batch)
        hidden, _, sums = forward(params, spec, compute, inputs, rng=rng, perturb=perturb)
        head, weights = head_params(params, spec, hidden), batch["weights"]
        layout = compute.layout
        sharding = None if layout is None else loss_sharding(head, spec, layout, weights.shape)
        loss, correct = cross_entropy(
            logits_of(spec),
            head,
            hidden,
            batch["targets"],
            weights,
            chunk=compute.loss_chunk,
            sharding=sharding,
            smoothing=config.label_smoothing,
            by_probability=config.loss == "dft",
        )
        return LossSums(loss, jnp.sum(weights), {"accuracy": correct}, sums)

    return objective


sft_objective = make(SftConfig())

_NEFTUNE = 0x6E6674  # folded into the key, so that its random numbers differ from those of dropout


def _embedding_noise(alpha: float, batch: Batch, key: Array) -> Callable[[Array], Array]:
    """Adds U(-1, 1) * alpha / sqrt(L * D) to embeddings, where L is the length of the token's document."""
    segments = batch["segment_ids"]
    ones = jnp.ones(segments.shape, jnp.float32)
    lengths = to_tokens(segment_sum(ones, segments, max_segments(batch)), segments)

    def add(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        scale = alpha / jnp.sqrt(jnp.maximum(lengths, 1.0) * x.shape[-1])
        noise = jax.random.uniform(key, x.shape, jnp.float32, -1.0, 1.0) * scale[..., None]
        return (x + noise).astype(x.dtype)

    return add
