"""Mixers with a state computed by chunks of packed rows, against the same layer over whole rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.arrays.tree import flatten
from meshtune.model.block import Context
from meshtune.model.compute import Compute
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.inputs import SequenceInfo
from meshtune.model.layer import LayerSpec, layer, layer_by_chunks
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.norm import NormSpec
from meshtune.model.short_conv import ShortConvSpec
from meshtune.model.spec import init_params
from model_specs import llama_layer, llama_spec

NORM = NormSpec(1e-5)
MIXERS = {
    "delta": DeltaNetSpec(key_heads=2, value_heads=4, key_dim=4, value_dim=4, taps=4, norm=NORM),
    "mamba2": Mamba2Spec(heads=4, head_dim=4, state=4, groups=2, taps=4, norm=NORM),
    "conv": ShortConvSpec(taps=3, channels=8),
}
# Chunks of 8 tokens: documents that end inside of chunks, at their ends, and reach over several; one of a single token
# at a border; padding. The last row does not fill its chunks.
SEGMENTS = jnp.array(
    [
        [1] * 5 + [2] * 3 + [3] * 12 + [4] * 6 + [0] * 3,
        [1] * 7 + [2] + [3] * 20 + [4],
    ],
    jnp.int32,
)


@pytest.mark.parametrize("name", ["delta", "conv", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_a_row_by_chunks_is_the_row(name):
    """Results and gradients of x and of every parameter, in float32: the sums of a chunk come in another order."""
    spec = LayerSpec(MIXERS[name], llama_layer(16, 2, 2, 4).ffn, NORM)
    params = init_params(llama_spec(32, 8, spec, 1, init_std=0.5), jax.random.key(0))
    node = jax.tree.map(lambda leaf: leaf[0], params["layers"]["0.0"])
    x = jax.random.normal(jax.random.key(1), (*SEGMENTS.shape, 8))
    weights = jax.random.normal(jax.random.key(2), x.shape) * (SEGMENTS > 0)[..., None]
    rows = SequenceInfo(jnp.zeros_like(SEGMENTS), SEGMENTS, {})

    def total(x, node, compute):
        body = layer if compute.attention_chunk is None else layer_by_chunks
        y = body(x, node, spec, Context(compute, rows, {})).y
        return jnp.sum(y * weights), y

    gradient = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=2)
    unchunked = gradient(x, node, Compute())
    chunked = gradient(x, node, dataclasses.replace(Compute(), attention_chunk=8, mlp_chunk=8))
    assert spec.mixer.carried(2, "float32") is not None
    (_, y), (d_x, d_node) = unchunked
    (_, our_y), (our_d_x, our_d_node) = chunked
    ours = flatten({"y": our_y, "x": our_d_x, "node": our_d_node})
    for path, expected in flatten({"y": y, "x": d_x, "node": d_node}).items():
        scale = float(jnp.abs(expected).max())
        assert scale > 0, path
        np.testing.assert_allclose(ours[path], expected, rtol=0, atol=1e-5 * scale, err_msg=path)
