"""Decoding in the absorbed form over a mesh gives the hidden states of one device. On four simulated devices, in a
process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compiling import FASTER
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import shardings
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.gather import layout_for
from meshtune.model.inputs import Inputs
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.model_cache import init_cache
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import abstract_params, init_params
from model_specs import llama_spec

LATENT = LatentAttentionSpec(4, 8, 12, 16, RopeSpec(1e4, 4), NormSpec(1e-6), 12**-0.5, query_latent=8)
SPEC = llama_spec(32, 16, LayerSpec(LATENT, MlpSpec(24), NormSpec(1e-6)), 2, init_std=0.3)


def inputs(start: int, stop: int) -> Inputs:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, stop)), jnp.int32)[:, start:]
    return Inputs(tokens, jnp.tile(jnp.arange(start, stop), (2, 1)), jnp.ones_like(tokens))


def decode_step(params, compute: Compute):
    """The hidden state of the token after a prompt of 20."""

    @jax.jit
    def step(params):
        cache = init_cache(SPEC, 2, 32, "float32", compute.layout)
        cache = forward(params, SPEC, compute, inputs(0, 20), cache=cache).cache
        return forward(params, SPEC, compute, inputs(20, 21), cache=cache).hidden

    return np.asarray(step(params))


def compare() -> None:
    assert LATENT.absorbs(2, 1, 32, {"kv_heads": {}}, Compute())
    params = init_params(SPEC, jax.random.key(0))
    expected = decode_step(params, Compute())
    for axes in ({"tp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2}):
        devices = jax.devices()[: int(np.prod(list(axes.values())))]
        layout = layout_for(make_mesh(MeshConfig(**axes), devices), SPEC)[0]
        placed = jax.device_put(params, shardings(abstract_params(SPEC), layout))
        actual = decode_step(placed, Compute(layout=layout))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=str(axes))


@pytest.mark.slow
def test_a_mesh_decodes_what_one_device_does():
    """float32: 1e-5 of the largest number."""
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare()
