"""Quantised weights: codes made here are those of the CPU, and products with them are those of float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import on_both

from meshtune.model.linear import matmul
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.formats import FORMATS
from meshtune.quantize.weight import QuantisedWeight

# Shares of the largest value: float32 sums of some thousand terms; weights and results rounded to 2^-9 in bfloat16.
ALLOWED = {"float32": 1e-5, "bfloat16": 2**-6}
# A share of the codes may differ by rounding at the border between two.
BORDERS = 1e-4
SIZES = {"gpu": (512, 4096, 1024), "cpu": (16, 128, 48)}  # tokens, inputs, outputs
FORMS = [(format, double) for format in FORMATS for double in (False, True)]


def weight_of(platform, seed=0):
    _, inputs, outputs = SIZES[platform]
    return np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)


@pytest.mark.parametrize(("platform", "format", "double"), on_both(FORMS, FORMS), indirect=["platform"])
def test_codes_are_those_the_cpu_makes(platform, format, double):
    weight, config = weight_of(platform), QuantizeConfig(format, 64, double)
    ours = QuantisedWeight.quantise(jnp.asarray(weight), config)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        theirs = QuantisedWeight.quantise(jnp.asarray(weight), config)
    differ = np.asarray(ours.codes).view(np.uint8) != np.asarray(theirs.codes).view(np.uint8)
    assert differ.mean() <= BORDERS
    np.testing.assert_allclose(np.asarray(ours.dequantise()), np.asarray(theirs.dequantise()), atol=0.5)
    scale = np.abs(weight).max()
    close = np.isclose(np.asarray(ours.dequantise()), np.asarray(theirs.dequantise()), atol=1e-6 * scale)
    assert 1 - close.mean() <= BORDERS


@pytest.mark.parametrize(
    ("platform", "format", "dtype"),
    on_both([(format, dtype) for format in FORMATS for dtype in ALLOWED], [("nf4", "bfloat16"), ("int8", "float32")]),
    indirect=["platform"],
)
def test_products_and_gradients_are_those_of_the_dequantised_weight_in_float64(platform, format, dtype):
    tokens, inputs, outputs = SIZES[platform]
    draw = np.random.default_rng(1)
    x, gradient = (jnp.asarray(draw.normal(size=(tokens, size)), dtype) for size in (inputs, outputs))
    weight = QuantisedWeight.quantise(jnp.asarray(weight_of(platform)), QuantizeConfig(format))
    wide = np.asarray(weight.dequantise("float32"), np.float64)

    @jax.jit
    def both(x, weight, gradient):
        y, pull = jax.vjp(lambda x: matmul(x, weight), x)
        return y, pull(gradient)[0]

    with jax.default_matmul_precision("highest"):
        y, d_x = both(x, weight, gradient)
    for part, ours, theirs in (
        ("product", y, np.asarray(x, np.float64) @ wide.T),
        ("gradient", d_x, np.asarray(gradient, np.float64) @ wide),
    ):
        error = np.abs(np.asarray(ours, np.float64) - theirs).max() / np.abs(theirs).max()
        assert error <= ALLOWED[dtype], f"{part} is off by {error:.1e} of its largest value"
