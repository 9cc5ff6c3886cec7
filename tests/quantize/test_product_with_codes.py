"""The product with a quantised weight: its numbers, its gradient, and that no weight is kept wide in memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.tree import merge
from meshtune.model.compute import Compute, compiler_options
from meshtune.model.decoder import forward
from meshtune.model.inputs import Inputs
from meshtune.model.linear import matmul
from meshtune.model.spec import Stack
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.formats import FORMATS, STORED
from meshtune.quantize.weight import QuantisedWeight
from model_specs import llama_layer, llama_spec

LAYER = llama_layer(512, 4, 2, 64)
SPEC = llama_spec(64, 256, LAYER, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_product_and_gradient_are_those_of_the_dequantised_weight(format, dtype):
    draw = np.random.default_rng(0)
    x, g = (jnp.asarray(draw.standard_normal((3, 5, n)), dtype) for n in (128, 48))
    weight = QuantisedWeight.quantise(jnp.asarray(draw.standard_normal((48, 128)), jnp.float32), QuantizeConfig(format))
    wide = weight.dequantise(dtype)
    y, pull = jax.vjp(lambda x: matmul(x, weight), x)
    expected, expected_pull = jax.vjp(lambda x: matmul(x, wide), x)
    np.testing.assert_array_equal(y, expected)
    # The same products, perhaps summed in another order.
    close = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(
        *(np.asarray(p(g)[0], np.float32) for p in (pull, expected_pull)), rtol=close, atol=close
    )


@pytest.mark.parametrize("format", STORED)
def test_codes_that_a_layer_saves_for_its_backward_pass_stay_the_codes(format):
    """`jax.checkpoint` rounds the floating-point arrays that it saves as IEEE formats are: e4m3 from 256 on is lost."""
    kind = STORED[format]
    draw = np.random.default_rng(1)
    content = draw.integers(0, 0x7F, (2, 16, 64 // kind.per)).astype(np.uint8)  # 0x7F is no e4m3 number
    codes = jnp.asarray(content.view(jnp.dtype(kind.dtype)))
    scales = jnp.full((2, 16, 2), 127 if kind.scales_dtype == "uint8" else 0.01, kind.scales_dtype)
    zeros = jnp.ones((2, 16, 2), "uint8") if kind.has_zeros else None
    stacked = QuantisedWeight(codes, scales, None, None, format, 32, "float32", zeros)
    x = jnp.asarray(draw.standard_normal((3, 64)), jnp.float32)

    def layer(x, stacked):
        weight = jax.tree.map(lambda leaf: checkpoint_name(leaf[1], "weight"), stacked)
        return jnp.sin(matmul(x, weight)).sum()

    saving = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("weight"))
    expected = jax.jit(jax.value_and_grad(layer))(x, stacked)
    assert np.isfinite(expected[0])
    np.testing.assert_array_equal(*(np.asarray(gradient) for gradient in (jax.grad(saving)(x, stacked), expected[1])))


def temporaries(layers, quantize, compute):
    """Bytes of temporaries of the gradient of `layers` layers with adapters, compiled and not run."""
    spec = dataclasses.replace(SPEC, dtype=compute.dtype, stacks=(Stack((LAYER,), layers),))
    arrays = abstract(LoraConfig(rank=2), spec, quantize=quantize)

    def loss(trainable, frozen, tokens):
        params = merge(trainable, frozen)
        return forward(params, spec, compute, Inputs(tokens, tokens, tokens)).hidden.astype(jnp.float32).sum()

    trainable, frozen = (
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
        for tree in (arrays.trainable, arrays.frozen)
    )
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    options = None if compute.dtype == "float32" else compiler_options("cpu")
    compiled = jax.jit(jax.grad(loss), compiler_options=options).lower(trainable, frozen, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("dtype", "remat"),
    [
        ("float32", "selective"),
        pytest.param("float32", "none", marks=pytest.mark.slow),
        pytest.param("float32", "full", marks=pytest.mark.slow),
        pytest.param("bfloat16", "none", marks=pytest.mark.slow),
        pytest.param("bfloat16", "selective", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_dequantised_layers(dtype, remat):
    """A further layer adds to the temporaries what it adds without quantisation, where no weight is ever kept.

    Of scanned layers; for unrolled ones see test_product_deviceless.py.
    """
    compute = Compute(dtype=dtype, remat=remat, attention="direct")
    a_layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    grown = {}
    for config in (None, QuantizeConfig("nf4")):
        few, many = (temporaries(layers, config, compute) for layers in (2, 6))
        grown[config] = (many - few) / 4
    wide = a_layer * np.dtype(jnp.dtype(dtype)).itemsize
    assert grown[QuantizeConfig("nf4")] - grown[None] < 0.05 * wide, (grown, wide)
