"""Where norms stand in a layer, written out for each placement; and the feed-forward network against torch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from meshtune.arrays.tree import flatten, unflatten
from meshtune.model.activations import ACTIVATIONS, XIELU
from meshtune.model.block import Context
from meshtune.model.compute import Compute
from meshtune.model.init import init_params
from meshtune.model.inputs import Inputs, rows_of
from meshtune.model.layer import LayerSpec, layer
from meshtune.model.layer_chunks import layer_by_chunks
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from model_specs import llama_layer, llama_spec

EMBED, NORM = 16, NormSpec(1e-5)
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
    return x, node, Context(compute, rows_of(INPUTS, spec.ropes), {})


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


@pytest.mark.parametrize("placement", ["pre", "post", "both", "parallel", "parallel_shared"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_norms_stand_where_the_placement_says(placement, chunk):
    """Whole rows and chunks of three tokens, with their gradients."""
    kind = LayerSpec(LLAMA.mixer, LLAMA.ffn, NORM, placement, scale=0.7)
    x, node, context = setting(kind, Compute(mlp_chunk=chunk, attention_chunk=chunk))
    whole = dataclasses.replace(context, compute=Compute())

    def ours(x, node):
        return layer_by_chunks(x, node, kind, context).y

    def expected(x, node):
        return by_hand(x, node, kind, whole)

    cotangent = jax.random.normal(jax.random.key(2), x.shape)
    for function in (ours, expected):
        assert function(x, node).shape == x.shape
    np.testing.assert_allclose(ours(x, node), expected(x, node), rtol=1e-5, atol=1e-5)
    gradients = [jax.vjp(function, x, node)[1](cotangent) for function in (ours, expected)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)


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


@pytest.mark.parametrize("activation", [*ACTIVATIONS, XIELU])
@pytest.mark.parametrize("gated", [True, False])
def test_a_feed_forward_network_is_that_of_torch(activation, gated):
    spec = MlpSpec(24, activation, bias=True, gated=gated)
    torch.manual_seed(0)
    names = {"gelu_tanh": "gelu_pytorch_tanh"}  # transformers' names that are not ours
    act = ACT2FN[names.get(activation, activation)]
    node = {name: torch.randn(leaf.shape) * 0.3 for name, leaf in flatten(spec.params(EMBED)).items()}

    def linear(x, name):
        return x @ node[f"{name}/weight"].T + node[f"{name}/bias"]

    x = torch.randn(2, 7, EMBED)
    if activation == XIELU:
        act.float().load_state_dict(
            {name: node[f"xielu/{name}"].reshape(array.shape) for name, array in act.state_dict().items()}
        )
    wide = act(linear(x, "gate")) * linear(x, "up") if gated else act(linear(x, "up"))
    ours = unflatten({name: jnp.asarray(array.numpy()) for name, array in node.items()})
    context = Context(Compute(), rows_of(INPUTS, ()), {})
    found = spec.apply(jnp.asarray(x.numpy()), ours, context).y
    np.testing.assert_allclose(found, linear(wide, "down").detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_packed_gate_is_that_of_two_projections():
    """Row 2 i of the fused weight is the gate's row i, row 2 i + 1 is up's."""
    plain, packed = MlpSpec(24, bias=True), MlpSpec(24, bias=True, packed=True)
    rng = np.random.default_rng(0)
    leaves = {path: rng.standard_normal(leaf.shape) for path, leaf in flatten(plain.params(EMBED)).items()}
    fused = {path: leaves[path] for path in leaves if path.startswith("down")} | {
        f"gate_up/{name}": np.stack([leaves[f"gate/{name}"], leaves[f"up/{name}"]], 1).reshape(48, *leaf.shape[1:])
        for name, leaf in (("weight", leaves["gate/weight"]), ("bias", leaves["gate/bias"]))
    }
    x, context = jnp.asarray(rng.standard_normal((2, 7, EMBED))), Context(Compute(), rows_of(INPUTS, ()), {})
    expected = plain.apply(x, unflatten({k: jnp.asarray(v) for k, v in leaves.items()}), context).y
    found = packed.apply(x, unflatten({k: jnp.asarray(v) for k, v in fused.items()}), context).y
    # float32 products that are summed in another order; the largest result is 229.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
