"""Weights laid out for decoding on a CPU are the same model: same logits, same tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families.case import loaded
from families.cases import BY_NAME
from meshtune.generate.decode_layout import decode_layout, decodes_from_copy
from meshtune.generate.engine import Engine
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.tiled import TiledWeight


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v2", "qwen3_5", "mamba2"])
def test_logits_are_those_of_stacked_weights(name):
    """float32: sums of another order, so 2e-5 of the largest logit."""
    spec, params = loaded(BY_NAME[name])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, spec.vocab, (2, 7)), jnp.int32)
    inputs = Inputs(tokens, jnp.broadcast_to(jnp.arange(7), (2, 7)), jnp.ones((2, 7), jnp.int32))
    by_layer = decode_layout(params, spec)
    assert all(isinstance(node, tuple) for node in by_layer["layers"].values())
    held = jax.tree.leaves(by_layer, is_leaf=lambda leaf: isinstance(leaf, TiledWeight))
    assert sum(isinstance(leaf, TiledWeight) for leaf in held) > spec.layers

    @jax.jit
    def scores(params):
        return logits(params, spec, forward(params, spec, Compute(), inputs).hidden)

    expected = np.asarray(scores(params))
    np.testing.assert_allclose(scores(by_layer), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_a_resident_engine_decodes_from_the_copy_and_says_the_same(monkeypatch):
    spec, params = loaded(BY_NAME["qwen3"])
    assert not decodes_from_copy(params, Compute()), "small weights stay as they are"
    monkeypatch.setattr("meshtune.generate.decode_layout.LEAST_BYTES", 0)
    engine, plain = Engine(params, spec, Compute(), resident=True), Engine(params, spec, Compute())
    prompts = [[1, 2, 3], [4, 5], [6]]
    assert engine.generate(prompts, max_tokens=12) == plain.generate(prompts, max_tokens=12)
    nodes = engine._decode_params["layers"].values()
    assert all(isinstance(node, tuple) for node in nodes)
    assert not decodes_from_copy(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), Compute())
