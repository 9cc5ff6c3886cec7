"""Every family computes what transformers computes, forward and backward, within and beyond its context."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshtune.arrays.tree import flatten
from meshtune.model.compute import Compute
from meshtune.model.decoder import hidden_states, logits
from tiny_models import CONFIGS, same_weights, tensor_names, torch_model

COMPUTE = Compute(attention="direct")


def rows(length: int, batch: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (batch, length)).astype(np.int32)


def our_logits(spec, params, tokens, compute=COMPUTE):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = hidden_states(params, spec, compute, jnp.asarray(tokens), positions, jnp.ones_like(positions))
    return logits(params, spec, hidden)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [9, 150])
def test_logits_equal_transformers(name, length):
    """Length 150 is beyond every config's 64 (and yarn's and llama3's original 32). float32 on both sides: 1e-4."""
    model = torch_model(name)
    spec, params = same_weights(model)
    tokens = rows(length)
    with torch.no_grad():
        expected = model(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(our_logits(spec, params, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama_bias", "llama_tied", "mistral_window", "qwen2_window", "qwen3_bias_window"])
def test_gradients_equal_transformers(name):
    """Of the mean next-token loss. 1e-4 of each tensor's largest gradient: float32 sums in two orders."""
    model = torch_model(name)
    spec, params = same_weights(model)
    tokens = rows(20)
    model(torch.tensor(tokens).long(), labels=torch.tensor(tokens).long()).loss.backward()

    def loss(params):
        predicted = jax.nn.log_softmax(our_logits(spec, params, tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(predicted, jnp.asarray(tokens)[:, 1:, None], axis=-1))

    ours = flatten(jax.grad(loss)(params))
    theirs = dict(model.named_parameters())
    for path, names in tensor_names(spec).items():
        expected = np.stack([theirs[n].grad.numpy() for n in names])
        found = np.asarray(ours[path]).reshape(expected.shape)
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0, err_msg=path)


@pytest.mark.parametrize("name", ["llama_bias", "qwen2_window", "qwen3_bias_window"])
def test_scanned_layers_equal_unrolled_ones(name):
    """The same operations in the same order: float32 rounding of differently fused code, 2e-5."""
    spec, params = same_weights(torch_model(name))
    tokens = rows(30)
    scanned = our_logits(spec, params, tokens, Compute(attention="direct", scan=True))
    unrolled = our_logits(spec, params, tokens, Compute(attention="direct", scan=False))
    np.testing.assert_allclose(scanned, unrolled, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("remat", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_rematerialisation_changes_nothing(remat):
    """Recomputing gives the same gradients, up to the rounding of differently fused code: 1e-5 of the largest."""
    spec, params = same_weights(torch_model("qwen3_bias_window"))
    tokens = rows(24)

    def gradient(compute):
        return jax.grad(lambda p: jnp.mean(our_logits(spec, p, tokens, compute) ** 2))(params)

    plain, again = flatten(gradient(Compute(attention="direct"))), flatten(gradient(Compute(remat=remat)))
    for path, leaf in plain.items():
        np.testing.assert_allclose(again[path], leaf, atol=1e-5 * float(jnp.abs(leaf).max()), rtol=0, err_msg=path)
