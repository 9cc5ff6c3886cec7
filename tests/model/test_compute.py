"""Choices of how to compute change no number: layers in a loop or unrolled, and rematerialisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families.case import VOCAB, as_inputs, our_logits
from meshtune.arrays.tree import flatten
from meshtune.model.compute import Compute
from tiny_models import same_weights, torch_model

ROWS = as_inputs([[row] for row in np.random.default_rng(0).integers(0, VOCAB, (2, 24))], 24)


@pytest.mark.parametrize(
    "name",
    ["qwen3_bias_window", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama_bias", "qwen2_window"))],
)
def test_scanned_layers_equal_unrolled_ones(name):
    """The same operations in the same order: float32 rounding of differently fused code, 2e-5."""
    spec, params = same_weights(torch_model(name))
    scanned = our_logits(params, spec, *ROWS, Compute(attention="direct", scan=True))
    unrolled = our_logits(params, spec, *ROWS, Compute(attention="direct", scan=False))
    np.testing.assert_allclose(scanned, unrolled, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("remat", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_rematerialisation_changes_nothing(remat):
    """Recomputing gives the same gradients, up to the rounding of differently fused code: 1e-5 of the largest."""
    spec, params = same_weights(torch_model("qwen3_bias_window"))

    def gradient(compute):
        return jax.jit(jax.grad(lambda p: jnp.mean(our_logits(p, spec, *ROWS, compute) ** 2)))(params)

    plain, again = flatten(gradient(Compute(attention="direct"))), flatten(gradient(Compute(remat=remat)))
    for path, leaf in plain.items():
        np.testing.assert_allclose(again[path], leaf, atol=1e-5 * float(jnp.abs(leaf).max()), rtol=0, err_msg=path)
