"""Attention as a block: what it asks of the kernels, and what it reads of its parameters by chunks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from meshtune.kernels import attention as kernels
from meshtune.model.attention import AlibiSpec, AttentionSpec
from meshtune.model.block import Context
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, sequence_info
from meshtune.model.layer import LayerSpec, layer_by_chunks
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import init_params
from model_specs import llama_spec

BLOCKS = {
    "grouped": AttentionSpec(4, 2, 8, rope=RopeSpec(1e4, 8)),
    "window, softcap, scale": AttentionSpec(4, 4, 8, rope=RopeSpec(1e4, 8), window=3, softcap=5.0, scale=0.2),
    "alibi, packed": AttentionSpec(4, 4, 8, alibi=AlibiSpec((0.5, 0.25, 0.125, 0.0625)), packed=True),
    "packed in groups, norm of all heads, clipped": AttentionSpec(
        4, 2, 8, rope=RopeSpec(1e4, 8), qk_norm=NormSpec(1e-5), qk_norm_over="vector", clip=0.5, packed=True
    ),
    "gate of the input, norms after rotation": AttentionSpec(
        4,
        2,
        8,
        rope=RopeSpec(1e4, 8),
        qk_norm=NormSpec(1e-5),
        qk_norm_over="own_head",
        qk_norm_after_rope=True,
        gate="input",
    ),
    "gate beside queries, sinks, chunked": AttentionSpec(
        4, 2, 8, rope=RopeSpec(1e4, 8), gate="query", sinks=True, chunk=3
    ),
    "norms of heads": AttentionSpec(4, 2, 8, rope=RopeSpec(1e4, 8), qk_norm=NormSpec(1e-5)),
}


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *((name, None) for name in BLOCKS),
        *(pytest.param(name, 4, marks=() if name == "grouped" else pytest.mark.slow) for name in BLOCKS),
    ],
)
def test_the_request_of_the_banner_is_the_one_that_runs(name, chunk, monkeypatch):
    """Whatever the block passes to the kernels, the banner and the self-check are told."""
    block, compute = BLOCKS[name], Compute(attention="direct", attention_chunk=chunk)
    kind = LayerSpec(block, MlpSpec(24), NormSpec(1e-5))
    spec = llama_spec(8, 16, kind, 1)
    node = jax.tree.map(lambda leaf: leaf[0], init_params(spec, jax.random.key(0))["layers"]["0.0"])
    tokens = jnp.zeros((2, 8), jnp.int32)
    inputs = Inputs(tokens, jnp.tile(jnp.arange(8), (2, 1)), jnp.ones_like(tokens))
    requests = []
    chosen = kernels.choose_backend
    monkeypatch.setattr(
        kernels, "choose_backend", lambda request, *arguments: requests.append(request) or chosen(request, *arguments)
    )
    context = Context(compute, sequence_info(inputs, spec.ropes), {})
    jax.eval_shape(lambda x: layer_by_chunks(x, node, kind, context).y, jnp.ones((2, 8, 16)))
    expected = block.attention_request(2, chunk or 8, 8, compute)
    assert {dataclasses.replace(request, platform=expected.platform) for request in requests} == {expected}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_parameter_is_read_by_one_of_the_passes_over_chunks(name):
    block = BLOCKS[name]
    reads = block.row_params()
    assert reads.memory | reads.chunk == set(block.params(16))


def test_key_value_heads_divide_the_heads():
    with pytest.raises(AssertionError, match="key-value heads"):
        AttentionSpec(4, 3, 8)
