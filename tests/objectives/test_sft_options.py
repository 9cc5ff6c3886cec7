"""Noise on embeddings as its paper has it, per document of a packed row, and only while training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.model.compute import Compute
from meshtune.objectives import sft
from meshtune.objectives.config import SftConfig
from tiny_models import same_weights, torch_model

ALPHA = 5.0


@pytest.fixture(scope="module")
def case():
    spec, params = same_weights(torch_model("llama3"))
    tokens = np.random.default_rng(0).integers(1, 97, (1, 24)).astype(np.int32)
    segments = np.repeat([[1] * 6 + [2] * 14 + [0] * 4], 1, 0).astype(np.int32)
    positions = np.concatenate([np.arange(6), np.arange(14), np.zeros(4)]).astype(np.int32)[None]
    batch = {"tokens": tokens, "targets": tokens, "positions": positions, "segment_ids": segments}
    return spec, params, batch | {"weights": (segments > 0).astype(np.float32)}


def test_noise_is_bounded_by_each_documents_own_length(case):
    """U(-1, 1) * alpha / sqrt(L * D): the largest of 192 or more draws is within 5% of its bound."""
    _, _, batch = case
    zeros = jnp.zeros((1, 24, 32))
    noise = np.abs(sft._embedding_noise(ALPHA, {k: jnp.asarray(v) for k, v in batch.items()}, jax.random.key(0))(zeros))
    for segment, length in ((1, 6), (2, 14)):
        magnitudes, bound = noise[batch["segment_ids"] == segment], ALPHA / np.sqrt(length * 32)
        assert 0.95 * bound < magnitudes.max() <= bound
        assert magnitudes.mean() == pytest.approx(bound / 2, rel=0.15)


def test_noise_changes_training_and_not_evaluation(case):
    spec, params, batch = case
    plain, noisy = sft.make(SftConfig()), sft.make(SftConfig(neftune_alpha=ALPHA))
    losses = {
        objective: jax.jit(lambda params, rng, f=objective: f(params, spec, Compute(loss_chunk=24), batch, rng).loss)
        for objective in (plain, noisy)
    }

    def loss(objective, rng):
        return float(losses[objective](params, rng))

    assert loss(noisy, None) == loss(plain, None)
    assert loss(noisy, jax.random.key(0)) == loss(noisy, jax.random.key(0))
    assert loss(noisy, jax.random.key(0)) != loss(noisy, jax.random.key(1)) != loss(plain, None)
