"""Latent attention over a cache: the absorbed form gives what the heads' own keys and values give."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.adapters.dora import DoRA
from meshtune.adapters.lora import LoRA
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten, unflatten
from meshtune.kernels.attention.direct import FEW_QUERIES
from meshtune.model.block import Context
from meshtune.model.cache import LayerCache
from meshtune.model.compute import AttentionName, Compute
from meshtune.model.inputs import Inputs, sequence_info
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.linear import TiledWeight
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight

EMBED, SLOTS, LENGTHS = 24, 96, (70, 41)  # tokens that the rows had before
SPEC = LatentAttentionSpec(4, 12, 10, 64, RopeSpec(1e4, 6, interleaved=True), NormSpec(1e-6), 18**-0.5, query_latent=20)


def random_node():
    flat, rng = flatten(SPEC.params(EMBED)), np.random.default_rng(0)
    arrays = {path: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32) for path, leaf in flat.items()}
    return unflatten(arrays)


def adapter(kind, weight):
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for shape in ((3, 64), (weight.shape[0], 3)))
    lora = LoRA(a, b, 1.5)
    return lora if kind == "lora" else DoRA(lora.a, lora.b, 1.3 * jnp.linalg.norm(weight, axis=1), lora.scale)


def change_form(node, form):
    """The node with another form of the matrix from latents to heads."""
    heads = node["kv_heads"]
    weight = heads["weight"]
    if "nf4" in form:
        heads = heads | {"weight": QuantisedWeight.quantise(weight, QuantizeConfig("nf4"))}
    if "transposed" in form:
        heads = heads | {"weight": TiledWeight.of(weight)}
    for kind in ("lora", "dora"):
        if kind in form:
            heads = heads | {"adapter": adapter(kind, weight)}
    return node | {"kv_heads": heads}


def inputs(total):
    positions = jnp.tile(jnp.arange(total), (2, 1))
    real = (positions < jnp.asarray(LENGTHS)[:, None]).astype(jnp.int32)
    return Inputs(positions, positions, real)


def context(batch, attention: AttentionName = "auto"):
    return Context(Compute(attention=attention), sequence_info(batch, (SPEC.rope,)), {})


def empty(dtype):
    """The arrays of an empty cache."""
    return {name: jnp.zeros((1, *leaf.shape), leaf.dtype) for name, leaf in SPEC.cache(2, SLOTS, dtype).items()}


@jax.jit
def fill_cache(node, x):
    """The arrays of the cache of rows that have been read."""
    cache = LayerCache(empty(x.dtype.name), 0, jnp.zeros(2, jnp.int32))
    cache = SPEC.apply(x, node, context(inputs(x.shape[1])), cache).cache
    assert cache is not None
    return cache.arrays


@functools.partial(jax.jit, static_argnames="attention")
def decode_step(node, new, arrays, attention: AttentionName = "auto"):
    """The results and the next arrays of the cache for the tokens `new` after those of LENGTHS."""
    cache = LayerCache(arrays, 0, jnp.asarray(LENGTHS))
    output = SPEC.apply(new, node, context(following(new.shape[1]), attention), cache)
    assert output.cache is not None
    return output.y, output.cache.arrays


def following(queries):
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(queries)
    return Inputs(positions, positions, jnp.ones_like(positions))


@pytest.mark.parametrize(
    ("form", "queries"),
    [
        ("plain", 1),
        ("transposed, lora", 3),
        ("nf4, dora", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("plain", 3), ("transposed", 1))),
    ],
)
def test_absorbed_equals_expanded(form, queries, monkeypatch):
    """float32, sums over the same numbers in another order: 1e-5 of results of about one. A cache as long as rows are
    in use makes the absorbed form the shorter one even with an adapter."""
    node, rng = change_form(random_node(), form), np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2, max(LENGTHS), EMBED)), jnp.float32)
    new = jnp.asarray(rng.normal(size=(2, queries, EMBED)), jnp.float32)
    arrays = fill_cache(random_node(), x)
    assert SPEC.absorbs(2, queries, SLOTS, node, Compute())
    assert not SPEC.absorbs(2, queries, SLOTS, node, Compute(attention="blockwise"))
    expected, after = decode_step(node, new, arrays, attention="blockwise")
    monkeypatch.setattr(LatentAttentionSpec, "_expanded", None)
    absorbed, absorbed_after = decode_step(node, new, arrays)
    assert 0.3 < np.abs(expected).max() < 30
    np.testing.assert_allclose(absorbed, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))
    for name, array in after.items():
        np.testing.assert_array_equal(absorbed_after[name], array)


def test_absorbed_equals_attention_without_a_cache():
    """In the form in which training computes whole rows."""
    node, rng = random_node(), np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, max(LENGTHS) + 1, EMBED)), jnp.float32)
    new = jnp.stack([x[row, length] for row, length in enumerate(LENGTHS)])[:, None]
    y, _ = decode_step(node, new, fill_cache(node, x[:, :-1]))
    rows = inputs(x.shape[1])
    rows = dataclasses.replace(rows, segment_ids=jnp.ones_like(rows.segment_ids))
    expected = jax.jit(lambda x: SPEC.apply(x, node, context(rows)).y)(x)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(y[row, 0], expected[row, length], rtol=0, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_is_as_near_to_float32_in_either_form():
    node, rng = random_node(), np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2, max(LENGTHS), EMBED)), jnp.float32)
    new = jnp.asarray(rng.normal(size=(2, 1, EMBED)), jnp.float32)
    exact = np.asarray(decode_step(node, new, fill_cache(node, x))[0])
    narrow = jnp.bfloat16
    arrays = fill_cache(node, x.astype(narrow))
    results = [decode_step(node, new.astype(narrow), arrays, attention=form)[0] for form in ("auto", "blockwise")]
    errors = [np.abs(np.asarray(result, np.float32) - exact) for result in results]
    absorbed, expanded = (float(error.mean() / np.abs(exact).mean()) for error in errors)
    assert 0 < absorbed < 1.5 * expanded < 0.05


def test_the_form_with_fewer_operations_is_chosen():
    """Of DeepSeek V3's heads, by hand: a latent of 512 for 128 heads of 128 and 128 numbers."""
    spec = LatentAttentionSpec(128, 128, 128, 512, RopeSpec(1e4, 64), NormSpec(1e-6), 1.0, query_latent=1536)
    absorbed, expanded = spec.operations(1, 1, 4096)
    assert absorbed == 128 * (512 * 256 + 4096 * 2 * (512 + 64))
    assert expanded == 128 * (4096 * 512 * 256 + 4096 * 2 * 192)
    assert expanded / absorbed > 100
    plain, compute = {"kv_heads": {"weight": None}}, Compute()
    adapted = {"kv_heads": {"weight": None, "adapter": ArraySpec((1,), "float32", ("rank",))}}
    assert spec.absorbs(1, 1, 2, plain, compute)
    assert not spec.absorbs(1, 1, 1, plain, compute), "one token with itself"
    # With an adapter the whole matrix is multiplied out, as for as many tokens as a latent has numbers.
    assert not spec.absorbs(1, 1, 512, adapted, compute)
    assert spec.absorbs(1, 1, 600, adapted, compute)
    assert spec.absorbs(4, 1, 256, adapted, compute), "once for all rows"
    assert not spec.absorbs(1, FEW_QUERIES + 1, 4096, plain, compute)
