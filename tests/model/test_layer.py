"""The places of norms in a layer, written out for each placement."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.model.block import Context
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, sequence_info
from meshtune.model.layer import LayerSpec, layer, layer_by_chunks
from meshtune.model.norm import NormSpec
from meshtune.model.spec import init_params
from model_specs import llama_layer, llama_spec

EMBED, NORM = 16, NormSpec(1e-5)
PLACEMENTS = ("pre", "post", "both", "parallel", "parallel_shared")
LLAMA = llama_layer(24, 4, 2, 4)
INPUTS = Inputs(jnp.zeros((2, 7), jnp.int32), jnp.tile(jnp.arange(7), (2, 1)), jnp.ones((2, 7), jnp.int32))


def setting(kind: LayerSpec, compute: Compute):
    """(x, parameters of one layer, context)."""
    spec = llama_spec(8, EMBED, kind, 1, init_std=0.5)
    node = jax.tree.map(lambda leaf: leaf[0], init_params(spec, jax.random.key(0))["layers"]["0.0"])
    node = {
        name: jax.tree.map(lambda leaf: leaf + 0.3, part) if "norm" in name else part for name, part in node.items()
    }
    x = jax.random.normal(jax.random.key(1), (2, 7, EMBED))
    return x, node, Context(compute, sequence_info(INPUTS, spec.ropes), {})


def by_hand(x, node, kind: LayerSpec, context):
    def mix(h):
        return kind.mixer.apply(h, node["attn"], context).y

    def feed(h):
        return kind.ffn.apply(h, node["mlp"], context).y

    def norm(h, name):
        return NORM(h, node[name])

    scale = kind.scale or 1.0
    match kind.placement:
        case "pre":
            x = x + scale * mix(norm(x, "attn_norm"))
            return x + scale * feed(norm(x, "mlp_norm"))
        case "post":
            x = x + scale * norm(mix(x), "attn_post_norm")
            return x + scale * norm(feed(x), "mlp_post_norm")
        case "both":
            x = x + scale * norm(mix(norm(x, "attn_norm")), "attn_post_norm")
            return x + scale * norm(feed(norm(x, "mlp_norm")), "mlp_post_norm")
        case "parallel":
            return x + scale * mix(norm(x, "attn_norm")) + scale * feed(norm(x, "mlp_norm"))
        case _:
            return x + scale * mix(norm(x, "attn_norm")) + scale * feed(norm(x, "attn_norm"))


@pytest.mark.parametrize(
    ("placement", "chunk"),
    [
        *((placement, None) for placement in PLACEMENTS),
        *((placement, 3) for placement in ("both", "parallel_shared")),
        *(pytest.param(placement, 3, marks=pytest.mark.slow) for placement in ("pre", "post", "parallel")),
    ],
)
def test_norms_stand_where_the_placement_says(placement, chunk):
    """Whole rows and chunks of three tokens, with their gradients."""
    kind = LayerSpec(LLAMA.mixer, LLAMA.ffn, NORM, placement, scale=0.7)
    x, node, context = setting(kind, Compute(mlp_chunk=chunk, attention_chunk=chunk))
    unchunked = dataclasses.replace(context, compute=Compute())

    def ours(x, node):
        return layer_by_chunks(x, node, kind, context).y

    def reference(x, node):
        return by_hand(x, node, kind, unchunked)

    cotangent = jax.random.normal(jax.random.key(2), x.shape)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(function, x, node):
        y, gradients = jax.vjp(function, x, node)
        return y, gradients(cotangent)

    (y, gradients), (expected, expected_gradients) = (value_and_gradients(f, x, node) for f in (ours, reference))
    assert y.shape == expected.shape == x.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected_gradients)


@pytest.mark.parametrize("missing", ["mixer", "ffn"])
def test_a_layer_of_one_block(missing):
    kind = dataclasses.replace(LLAMA, **{missing: None})
    x, node, context = setting(kind, Compute())
    name = "mlp" if missing == "mixer" else "attn"
    assert set(node) == {name, f"{name}_norm"}
    block = kind.blocks[0]
    np.testing.assert_allclose(
        layer(x, node, kind, context).y,
        x + block.apply(kind.norm(x, node[f"{name}_norm"]), node[name], context).y,
        rtol=1e-6,
    )
