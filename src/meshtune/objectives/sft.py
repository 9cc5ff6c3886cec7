"""Supervised fine-tuning and continued pretraining: weighted next-token cross-entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.kernels.cross_entropy import cross_entropy
from meshtune.model.compute import Compute
from meshtune.model.decoder import head_logits, head_params, hidden_states
from meshtune.model.in_use import loss_split
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch, Objective, Score
from meshtune.objectives.segments import slots, to_tokens, totals


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """`label_smoothing` spreads that share of every target over the vocabulary (arXiv:1512.00567).

    `neftune_alpha` adds noise to the embeddings while training (https://arxiv.org/abs/2310.05914).
    """

    label_smoothing: float = 0.0
    neftune_alpha: float | None = None

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise UserError("label_smoothing must be in [0, 1)", where="stage.label_smoothing", fix="such as 0.1")


def make(config: SftConfig) -> Objective:
    """-log p(target) times the target's weight, summed. Metric: accuracy, the weight of targets predicted first."""

    def score(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        perturb = None
        if config.neftune_alpha is not None and rng is not None:
            perturb = _noise(config.neftune_alpha, batch, jax.random.fold_in(rng, _NEFTUNE))
        hidden = hidden_states(
            params, spec, compute, batch["tokens"], batch["positions"], batch["segment_ids"], rng=rng, perturb=perturb
        )
        head, weights = head_params(params, spec), batch["weights"]
        split = loss_split(head, spec, compute.layout, weights.shape)
        loss, correct = cross_entropy(
            head_logits,
            head,
            hidden,
            batch["targets"],
            weights,
            chunk=compute.loss_chunk,
            split=split,
            smoothing=config.label_smoothing,
        )
        return Score(loss, jnp.sum(weights), {"accuracy": correct})

    return score


score = make(SftConfig())

_NEFTUNE = 0x6E6674  # keeps its random numbers apart from those of dropout


def _noise(alpha: float, batch: Batch, key: Array) -> Callable[[Array], Array]:
    """Embeddings + U(-1, 1) * alpha / sqrt(L * D), L being the tokens of the document a token belongs to."""
    segments = batch["segment_ids"]
    count = slots(batch)
    lengths = to_tokens(totals(jnp.ones(segments.shape, jnp.float32), segments, count), segments)

    def add(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        scale = alpha / jnp.sqrt(jnp.maximum(lengths, 1.0) * x.shape[-1])
        noise = jax.random.uniform(key, x.shape, jnp.float32, -1.0, 1.0) * scale[..., None]
        return (x + noise).astype(x.dtype)

    return add
