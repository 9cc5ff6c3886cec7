"""Every backend that computes here, against the definition (values) and torch (values and gradients) in float64."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshtune.kernels.attention.blocks as blocks
from kernels.attention_cases import (
    CLOSE,
    ROWS,
    assert_equals_torch,
    by_backend,
    by_triton,
    cache_case,
    case,
    unordered_case,
)
from kernels.attention_oracle import normal, pack_rows, reference, same_tokens
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT, attention, triton_kernels
from meshtune.kernels.attention.triton_kernels import Tile, Tiles

XLA_BACKENDS = ["direct", "blockwise"]
BACKENDS = {name: functools.partial(by_backend, name) for name in XLA_BACKENDS} | {"triton": by_triton}
# An interpreted kernel takes seconds to compile: the fast tier has one case of each kind.
FAST_TRITON = ("odd length", "packed", "padded", "window and softcap", "head of 80")
CASES = [
    pytest.param(backend, name, marks=pytest.mark.slow if backend == "triton" and name not in FAST_TRITON else ())
    for backend in BACKENDS
    for name in ROWS
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Small blocks of several sizes, so that small rows have many, both full and partial."""
    monkeypatch.setattr(blocks, "block_sizes", lambda request: (min(16, request.q_length), min(24, request.kv_length)))
    tiles = Tiles(Tile(16, 8, 4, 1), Tile(8, 16, 4, 1), Tile(16, 16, 4, 1))
    monkeypatch.setattr(triton_kernels, "tiles_of", lambda request: tiles)


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_values_and_gradients_equal_torchs_and_the_definition_in_float64(backend, name):
    arrays = q, k, v, _, tokens, options = case(name)
    results = BACKENDS[backend](*arrays, aligned=True)
    np.testing.assert_allclose(results[0], reference(q, k, v, **tokens, **options), **CLOSE)
    assert_equals_torch(results, *arrays)


@pytest.mark.parametrize(
    ("backend", "T", "start"),
    [*[(name, *case) for name in XLA_BACKENDS for case in [(1, 40), (1, 0), (9, 13), (20, 0)]], ("triton", 20, 13)],
)
def test_queries_with_a_longer_cache_equal_torch(backend, T, start):
    arrays = cache_case(T, start)
    assert_equals_torch(BACKENDS[backend](*arrays), *arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_and_positions_may_be_in_any_order(backend):
    """Only `aligned` promises that segments are contiguous and that positions rise by one."""
    arrays = unordered_case()
    assert_equals_torch(BACKENDS[backend](*arrays), *arrays)


@pytest.mark.parametrize("name", ["packed", "padded", "odd length", "softcap"])
@pytest.mark.parametrize("backend", XLA_BACKENDS)
def test_without_causality_tokens_see_their_whole_segment(backend, name):
    """The definition and torch, for tokens of which none is later than another."""
    *arrays, tokens, options = case(name)
    results = BACKENDS[backend](*arrays, tokens, options | {"causal": False})
    simultaneous = {key: np.zeros_like(array) if "positions" in key else array for key, array in tokens.items()}
    np.testing.assert_allclose(results[0], reference(*arrays[:3], **simultaneous, **options), **CLOSE)
    assert_equals_torch(results, *arrays, simultaneous, options)
    assert np.abs(results[0] - reference(*arrays[:3], **tokens, **options)).max() > 0.1, "the mask changes nothing"


@pytest.mark.parametrize("backend", XLA_BACKENDS)
def test_the_promise_of_aligned_rows_does_not_change_results(backend):
    arrays = case("window and softcap")
    for x, promised in zip(BACKENDS[backend](*arrays), BACKENDS[backend](*arrays, aligned=True), strict=True):
        np.testing.assert_allclose(x, promised, rtol=1e-6, atol=1e-6)


def test_default_block_sizes_equal_torch(monkeypatch):
    """At a length that has full and partial blocks."""
    monkeypatch.undo()
    q, k, v, g = normal(3, (2, 260, 6, 8), (2, 260, 2, 8), (2, 260, 2, 8), (2, 260, 6, 8))
    arrays = (
        q,
        k,
        v,
        g,
        same_tokens(*pack_rows([[150, 101], [251]], 260)),
        {"scale": 0.35, "window": None, "softcap": None},
    )
    assert_equals_torch(by_backend("blockwise", *arrays, aligned=True), *arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_give_zero_and_no_gradient(backend):
    """Exactly zero, not approximately: a NaN or a stray gradient of padding would reach the weights."""
    arrays = *_, tokens, _ = case("padded")
    padding = tokens["q_segments"] == 0
    assert padding.any()
    for x in BACKENDS[backend](*arrays, aligned=True):
        assert np.isfinite(x).all()
        assert not x[padding].any()


@pytest.mark.parametrize("backend", [*XLA_BACKENDS, pytest.param("triton", marks=pytest.mark.slow)])
def test_nan_reaches_exactly_the_tokens_that_see_it(backend):
    """A NaN must reach the loss, however the maximum score is computed; other tokens are unchanged, bit for bit."""
    q, k, v, *arguments = case("packed")
    clean = BACKENDS[backend](q, k, v, *arguments, aligned=True)[0]
    k = k.copy()
    k[0, 25] = np.nan  # a token of the third document of the first row
    out = BACKENDS[backend](q, k, v, *arguments, aligned=True)[0]
    sees_it = np.zeros(out.shape[:2], bool)
    sees_it[0, 25:51] = True
    assert np.isnan(out[sees_it]).all()
    np.testing.assert_array_equal(out[~sees_it], clean[~sees_it])


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_of_a_row_do_not_influence_each_other(backend):
    """Bit for bit: multiplying one document of a row by 100 leaves the results of the others unchanged."""
    q, k, v, g, tokens, options = case("packed")
    before = BACKENDS[backend](q, k, v, g, tokens, options, aligned=True)
    is_changed = tokens["q_segments"] == 3
    changed = [np.where(is_changed[..., None, None], x * 100, x) for x in (q, k, v)]
    after = BACKENDS[backend](*changed, g, tokens, options, aligned=True)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[~is_changed], y[~is_changed])


@pytest.mark.parametrize("backend", XLA_BACKENDS)
def test_bfloat16_is_summed_in_float32(backend):
    """Against the float64 definition on the rounded inputs: only weights and the result are rounded, to 8 bits.

    A bfloat16 sum of 1000 equal terms would stop growing at 256.
    """
    T = 1000
    q, k, v = normal(4, (1, 2, 2, 8), (1, T, 1, 8), (1, T, 1, 8))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q * 0.01, k, np.abs(v)))
    tokens = {
        "q_positions": np.full((1, 2), T, np.int32),
        "kv_positions": np.arange(T, dtype=np.int32)[None],
        "q_segments": np.ones((1, 2), np.int32),
        "kv_segments": np.ones((1, T), np.int32),
    }
    out = attention(q, k, v, **tokens, scale=1.0, backend=backend)
    assert out.dtype == jnp.bfloat16
    expected = reference(*(np.asarray(x, np.float64) for x in (q, k, v)), **tokens, scale=1.0)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-7)


@pytest.mark.parametrize("aligned", [True, False])
def test_the_blockwise_program_has_no_array_of_all_scores(aligned):
    """From the compiled forward and backward: no array is larger than the inputs, which are far smaller than T * T."""
    T, h = 512, 4
    q, k, v, g = normal(5, (1, T, 2, h), (1, T, 1, h), (1, T, 1, h), (1, T, 2, h))
    tokens = same_tokens(*pack_rows([[T]], T))

    def largest(backend):
        def forward_and_backward(q, k, v, g):
            out, vjp = jax.vjp(lambda *x: attention(*x, **tokens, scale=0.5, backend=backend, aligned=aligned), q, k, v)
            return out, vjp(g)

        text = jax.jit(forward_and_backward).lower(q, k, v, g).compile().as_text()
        shapes = re.findall(r"\b(?:f32|f16|bf16|pred|s32)\[([\d,]+)\]", text)
        return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)

    assert largest("direct") >= T * T  # the test detects such an array
    assert largest("blockwise") <= 2 * T * h


def test_blockwise_computes_only_visible_blocks():
    """The bounds of the loops for a packed row depend on its documents, not on its length."""
    T, block = 128, 16
    segments, positions = pack_rows([[32, 32, 32, 32]], T)

    def count(window, segments, positions):
        tokens = blocks.TokenBlocks(*(x.reshape(1, -1, block).swapaxes(0, 1) for x in (positions, segments)))
        start, stop = blocks.true_range(blocks.any_visible(tokens, tokens, window))
        return int((stop - start).sum())

    assert count(None, segments, positions) == 4 * 3  # a triangle of 2 blocks in each of 4 documents
    one_segment, row_positions = pack_rows([[T]], T)
    assert count(None, one_segment, row_positions) == 8 * 9 // 2
    assert count(16, one_segment, row_positions) == 8 + 7  # the diagonal and the one before it
    assert count(None, np.zeros_like(segments), positions) == 0


def test_a_checkpoint_policy_that_saves_the_output_avoids_the_second_forward_pass():
    """With the two names saved, the program of the gradient has one loop fewer."""
    q, k, v, g, tokens, options = case("packed")

    def loops(policy):
        attend = jax.checkpoint(
            lambda q, k, v: attention(q, k, v, **tokens, **options, backend="blockwise", aligned=True), policy=policy
        )
        gradient = jax.grad(lambda q, k, v: (attend(q, k, v) * g).sum(), (0, 1, 2))
        return str(jax.make_jaxpr(gradient)(q, k, v)).count("scan[")

    save_names = jax.checkpoint_policies.save_only_these_names(OUTPUT, LOG_SUM_EXP)
    assert loops(save_names) == loops(jax.checkpoint_policies.nothing_saveable) - 1
