"""The flash-attention kernels, interpreted: against torch in float64 (values and gradients) over a grid of shapes.

The interpreter computes with XLA what the kernels say, with float32 sums, so the tolerance is that of float32: sums of
up to 300 terms of size one err by some 1e-6, and 2e-5 leaves room for gradients' larger values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention_oracle import normal, packed, reference, torch_gradients
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT, AttentionInputs, AttentionRequest, triton_tiles
from meshtune.kernels.attention.triton import run
from meshtune.kernels.attention.triton_tiles import Tile, Tiles

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
SMALL = Tiles(Tile(16, 8, 4, 1), Tile(8, 16, 4, 1), Tile(16, 16, 4, 1))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small blocks of several sizes, so that small rows have many, whole and broken."""
    monkeypatch.setattr(triton_tiles, "tiles_of", lambda request: SMALL)


# (rows of document lengths, T, H, K, h, window, softcap)
ROWS = {
    "one document": ([[64]], 64, 4, 4, 16, None, None),
    "odd length": ([[37], [35]], 37, 4, 2, 16, None, None),
    "one token": ([[1]], 1, 4, 1, 16, None, None),
    "packed": ([[20, 1, 30, 13], [50, 14]], 64, 4, 2, 16, None, None),
    "many segments": ([[3] * 23, [7] * 10], 71, 6, 3, 16, None, None),
    "padding, and a row of nothing else": ([[10], [41], []], 41, 4, 1, 16, None, None),
    "window": ([[50], [30, 20]], 50, 4, 2, 16, 7, None),
    "window of one": ([[33]], 33, 2, 2, 16, 1, None),
    "window wider than the row": ([[33]], 33, 2, 1, 16, 100, None),
    "softcap": ([[40, 9]], 53, 4, 1, 16, None, 1.5),
    "window and softcap": ([[61], [30, 20, 5]], 61, 8, 2, 16, 19, 2.0),
    "all padding": ([[], []], 32, 2, 1, 16, 5, 3.0),
    "head of 80": ([[40]], 40, 2, 1, 80, None, None),
    "head of 96": ([[30, 9]], 40, 4, 2, 96, 11, None),
    "head of 256": ([[24]], 24, 1, 1, 256, None, None),
    "small head": ([[24, 8]], 32, 2, 1, 8, None, None),
}


def case(name, seed=0):
    lengths, T, H, K, h, window, softcap = ROWS[name]
    B = len(lengths)
    q, k, v, g = normal(seed, (B, T, H, h), (B, T, K, h), (B, T, K, h), (B, T, H, h))
    segments, positions = packed(lengths, T)
    tokens = {
        "q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments,
    }  # fmt: skip
    return q, k, v, g, tokens, {"scale": h**-0.5 * 1.3, "window": window, "softcap": softcap}


def asked(q, k, options, chip="sm_90a"):
    (B, T, H, h), (_, S, K, _) = q.shape, k.shape
    return AttentionRequest(
        batch=B, q_length=T, kv_length=S, heads=H, kv_heads=K, head_dim=h, dtype=str(q.dtype), platform="cuda",
        chip=chip, **options,
    )  # fmt: skip


def with_gradients(q, k, v, g, tokens, options, **changes):
    request = asked(q, k, options, **changes)

    # Half the time to compile.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(q, k, v, g):
        out, pull = jax.vjp(lambda *qkv: run(AttentionInputs(*qkv, **tokens), request, interpret=True), q, k, v)
        return out, *pull(g)

    return [np.asarray(x) for x in both(q, k, v, g)]


FEW = ("odd length", "packed", "padding, and a row of nothing else", "window and softcap", "head of 80")


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ROWS])
def test_values_and_gradients_are_torchs_in_float64(name):
    q, k, v, g, tokens, options = case(name)
    ours = with_gradients(q, k, v, g, tokens, options)
    np.testing.assert_allclose(ours[0], reference(q, k, v, **tokens, **options), **CLOSE)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)
    unseen = tokens["q_segments"] == 0
    for x in ours:
        assert not x[unseen].any()  # exactly: padding must not reach the weights


def test_blocks_past_the_end_of_a_row_write_nothing(monkeypatch):
    """Rows of 40 tokens are rounded up to 64 for blocks of 32, so that blocks of 8 and 16 lie wholly past their end."""
    tiles = Tiles(Tile(16, 32, 4, 1), Tile(8, 16, 4, 1), Tile(8, 8, 4, 1))
    monkeypatch.setattr(triton_tiles, "tiles_of", lambda request: tiles)
    q, k, v, g = normal(6, (2, 40, 2, 16), (2, 40, 1, 16), (2, 40, 1, 16), (2, 40, 2, 16))
    segments, positions = packed([[40], [25, 15]], 40)
    tokens = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}
    options = {"scale": 0.3, "window": None, "softcap": None}
    ours = with_gradients(q, k, v, g, tokens, options)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


def test_queries_against_a_longer_cache():
    T, S, start = 20, 57, 13
    q, k, v, g = normal(1, (2, T, 4, 16), (2, S, 2, 16), (2, S, 2, 16), (2, T, 4, 16))
    slots = np.arange(S)
    kv_segments = np.stack([slots < start + T, (slots >= 3) & (slots < start + T)]).astype(np.int32)
    kv_positions = np.stack([slots, slots - 3]).astype(np.int32)
    tokens = {
        "q_positions": kv_positions[:, start : start + T],
        "kv_positions": kv_positions,
        "q_segments": kv_segments[:, start : start + T],
        "kv_segments": kv_segments,
    }
    options = {"scale": 0.3, "window": None, "softcap": None}
    ours = with_gradients(q, k, v, g, tokens, options)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


def test_segments_in_any_order_and_positions_that_jump():
    random = np.random.default_rng(2)
    q, k, v, g = normal(2, (2, 45, 2, 16), (2, 70, 2, 16), (2, 70, 2, 16), (2, 45, 2, 16))
    tokens = {
        f"{side}_{what}": random.integers(0, high, (2, n)).astype(np.int32)
        for side, n in (("q", 45), ("kv", 70))
        for what, high in (("positions", 90), ("segments", 4))
    }
    options = {"scale": 0.3, "window": 31, "softcap": None}
    ours = with_gradients(q, k, v, g, tokens, options)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_100a", "sm_86", "gfx942", "gfx950"])
def test_blocks_as_they_are_shipped(chip, monkeypatch):
    """The sizes that are really used, in bfloat16, at a length that fills some blocks and breaks others.

    Weights and their gradients are rounded to 8 bits before they are multiplied: 2^-8 of a sum's largest terms.
    """
    monkeypatch.undo()
    T, lengths = 200, [[150, 41], [200]]
    q, k, v, g = normal(3, (2, T, 2, 64), (2, T, 1, 64), (2, T, 1, 64), (2, T, 2, 64))
    q, k, v, g = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v, g))
    segments, positions = packed(lengths, T)
    tokens = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}
    options = {"scale": 0.125, "window": None, "softcap": None}
    ours = with_gradients(q, k, v, g, tokens, options, chip=chip)
    theirs = torch_gradients(*(x.astype(np.float64) for x in (q, k, v, g)), tokens, **options)
    for mine, exact in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), exact, atol=2**-7 * np.abs(exact).max(), rtol=2**-7)


def test_another_document_cannot_be_felt():
    """Bit for bit: changing one document of a row to huge numbers leaves its neighbours as they were."""
    q, k, v, g, tokens, options = case("packed")
    before = with_gradients(q, k, v, g, tokens, options)
    other = tokens["q_segments"] == 3
    changed = [np.where(other[..., None, None], x * 100, x) for x in (q, k, v)]
    after = with_gradients(*changed, g, tokens, options)
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[~other], two[~other])


@pytest.mark.slow
def test_nan_is_passed_on_to_those_who_see_it():
    q, k, v, g, tokens, options = case("packed")
    clean = with_gradients(q, k, v, g, tokens, options)[0]
    k = k.copy()
    k[0, 25] = np.nan  # a token of the third document of the first row
    out = with_gradients(q, k, v, g, tokens, options)[0]
    sees = np.zeros(out.shape[:2], bool)
    sees[0, 25:51] = True
    assert np.isnan(out[sees]).all()
    np.testing.assert_array_equal(out[~sees], clean[~sees])


def test_the_backward_pass_need_not_run_the_forward_kernel_again():
    """With the two names kept, a rematerialised program holds three kernels and not four."""
    q, k, v, g, tokens, options = case("packed")
    request = asked(q, k, options)

    def kernels(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        attend = jax.checkpoint(lambda *qkv: run(AttentionInputs(*qkv, **tokens), request), policy=policy)
        return used_kernels(jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[1](g))(q, k, v).jaxpr)

    assert kernels(OUTPUT, LOG_SUM_EXP) == 3
    assert kernels() == 4


def used_kernels(jaxpr):
    """Kernels whose results something reads: the rest XLA drops."""
    read = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
    inner = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name != "pallas_call" and "jaxpr" in eqn.params]
    here = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    return sum(any(id(x) in read for x in eqn.outvars) for eqn in here) + sum(
        used_kernels(getattr(one, "jaxpr", one)) for one in inner
    )
