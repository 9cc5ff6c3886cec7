"""Chunked cross-entropy and log-probabilities, values and gradients, against torch in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from platforms import on_both

from meshtune.kernels.cross_entropy import cross_entropy, log_probs

# Shares of the largest value. Logits are float32 sums in every case; in bfloat16 the gradients' products are rounded.
ALLOWED = {"float32": 1e-5, "bfloat16": 2**-6}
# rows, tokens, width, vocabulary, chunk, smoothing
SHAPES = {
    "Llama 3's vocabulary": (2, 192, 512, 128256, 64, 0.0),
    "odd sizes": (3, 131, 96, 4093, 37, 0.0),
    "label smoothing": (2, 128, 256, 32000, 128, 0.1),
}
SMALL = {name: (2, 13, 16, 61, 5, shape[-1]) for name, shape in SHAPES.items()}
CASES = [(name, dtype) for name in SHAPES for dtype in ALLOWED]
QUICK = [(name, "float32") for name in SHAPES]


def head(params, hidden):
    return jnp.einsum("...d,vd->...v", hidden, params["weight"], preferred_element_type=jnp.float32)


def arrays_of(shape, dtype):
    """Hidden states and head as `dtype` has them, targets, and weights, a third of them zero; float32 and int32."""
    B, T, D, V, _, _ = shape
    random = np.random.default_rng(list(map(ord, dtype)))
    hidden, weight = random.normal(size=(B, T, D)), random.normal(size=(V, D)) / D**0.5
    hidden, weight = (np.asarray(jnp.asarray(array, dtype), np.float32) for array in (hidden, weight))
    targets = random.integers(0, V, (B, T)).astype(np.int32)
    weights = (random.integers(0, 3, (B, T)) * random.uniform(0.5, 1.5, (B, T))).astype(np.float32)
    return hidden, weight, targets, weights


def exact(hidden, weight, targets, weights, smoothing, per_token):
    """(value, d hidden, d weight) in float64; the value is the sum, or each token's weighted log-probability."""
    hidden, weight = (torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (hidden, weight))
    logits = (hidden @ weight.T).reshape(-1, weight.shape[0])
    losses = torch.nn.functional.cross_entropy(
        logits, torch.tensor(targets.reshape(-1).astype(np.int64)), reduction="none", label_smoothing=smoothing
    )
    weighted = losses * torch.tensor(weights.reshape(-1), dtype=torch.float64)
    weighted.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    value = weighted.reshape(targets.shape) if per_token else weighted.sum()
    return [array.detach().numpy() for array in (value, hidden.grad, weight.grad)]


def compare(ours, theirs, dtype):
    for part, actual, expected in zip(("value", "d hidden", "d weight"), ours, theirs, strict=True):
        error = np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
        assert error <= ALLOWED[dtype], f"{part} is off by {error:.1e} of its largest value"


@pytest.mark.parametrize(("platform", "name", "dtype"), on_both(CASES, QUICK), indirect=["platform"])
def test_cross_entropy_is_torchs(platform, name, dtype):
    shape = (SHAPES if platform == "gpu" else SMALL)[name]
    chunk, smoothing = shape[-2:]
    hidden, weight, targets, weights = arrays_of(shape, dtype)
    facts = jnp.asarray(targets), jnp.asarray(weights)

    @jax.jit
    def both(hidden, weight):
        def loss(hidden, weight):
            return cross_entropy(head, {"weight": weight}, hidden, *facts, chunk=chunk, smoothing=smoothing)[0]

        return jax.value_and_grad(loss, (0, 1))(hidden, weight)

    with jax.default_matmul_precision("highest"):
        value, (d_hidden, d_weight) = both(jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype))
    compare((value, d_hidden, d_weight), exact(hidden, weight, targets, weights, smoothing, False), dtype)


@pytest.mark.parametrize(("platform", "name", "dtype"), on_both(CASES, QUICK[:1]), indirect=["platform"])
def test_log_probs_are_torchs(platform, name, dtype):
    shape = (SHAPES if platform == "gpu" else SMALL)[name]
    hidden, weight, targets, weights = arrays_of(shape, dtype)
    facts = jnp.asarray(targets), jnp.asarray(weights)

    @jax.jit
    def both(hidden, weight):
        def weighted_loss(hidden, weight):
            values = log_probs(head, {"weight": weight}, hidden, facts[0], facts[1] > 0, chunk=shape[-2])
            return -values * weights

        value, pull = jax.vjp(weighted_loss, hidden, weight)
        return value, *pull(jnp.ones_like(value))

    with jax.default_matmul_precision("highest"):
        ours = both(jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype))
    compare(ours, exact(hidden, weight, targets, weights, 0.0, True), dtype)
