"""Both backends against the definition in float64 (values), torch in float64 (values and gradients), and each other."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshtune.kernels.attention.blocks as blocks
from kernels.attention_oracle import normal, packed, reference, torch_gradients
from meshtune.errors import UserError
from meshtune.kernels.attention import (
    BACKENDS,
    LOG_SUM_EXP,
    OUTPUT,
    AttentionRequest,
    Backend,
    attention,
    choose_backend,
)

# float32 sums of up to 300 terms of size one: errors of some 1e-6; 2e-5 leaves room for gradients' larger values.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
BOTH = ["direct", "blockwise"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two different small sizes, so that small rows have many, whole and broken."""
    monkeypatch.setattr(blocks, "block_sizes", lambda request: (min(16, request.q_length), min(24, request.kv_length)))


# (rows of document lengths, T, H, K, h, window, softcap)
ROWS = {
    "one document": ([[64]], 64, 4, 4, 8, None, None),
    "odd length": ([[37], [35]], 37, 4, 2, 8, None, None),
    "one token": ([[1]], 1, 4, 1, 8, None, None),
    "packed": ([[20, 1, 30, 13], [50, 14]], 64, 4, 2, 16, None, None),
    "many segments": ([[3] * 23, [7] * 10], 71, 6, 3, 8, None, None),
    "padded": ([[10], [41], []], 41, 4, 1, 8, None, None),
    "window": ([[50], [30, 20]], 50, 4, 2, 8, 7, None),
    "window of one": ([[33]], 33, 2, 2, 8, 1, None),
    "window wider than the row": ([[33]], 33, 2, 1, 8, 100, None),
    "softcap": ([[40, 9]], 53, 4, 1, 4, None, 1.5),
    "window and softcap": ([[61], [30, 20, 5]], 61, 8, 2, 12, 19, 2.0),
    "all padding": ([[], []], 32, 2, 1, 8, 5, 3.0),
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


def with_gradients(q, k, v, g, tokens, **options):
    def run(q, k, v):
        return attention(q, k, v, **tokens, **options)

    # Half the time to compile; the programs' memory below, and every other test, is with the compiler's own choice.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(q, k, v, g):
        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(g)

    return [np.asarray(x) for x in both(q, k, v, g)]


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_torchs_and_the_definitions_in_float64(name, backend):
    q, k, v, g, tokens, options = case(name)
    ours = with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=True)
    np.testing.assert_allclose(ours[0], reference(q, k, v, **tokens, **options), **CLOSE)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(("T", "start"), [(1, 40), (1, 0), (9, 13), (20, 0)])
def test_queries_against_a_longer_cache(T, start, backend):
    """A cache of 57 slots, filled up to the queries' last: the rest are segment 0, and rows differ in their lengths."""
    S = 57
    q, k, v, g = normal(1, (2, T, 4, 8), (2, S, 2, 8), (2, S, 2, 8), (2, T, 4, 8))
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
    ours = with_gradients(q, k, v, g, tokens, **options, backend=backend)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.parametrize("backend", BOTH)
def test_segments_in_any_order_and_positions_that_jump(backend):
    """Nothing but `aligned` may assume that segments stand together or that positions rise by one."""
    random = np.random.default_rng(2)
    q, k, v, g = normal(2, (2, 45, 2, 8), (2, 70, 2, 8), (2, 70, 2, 8), (2, 45, 2, 8))
    tokens = {
        f"{side}_{what}": random.integers(0, high, (2, n)).astype(np.int32)
        for side, n in (("q", 45), ("kv", 70))
        for what, high in (("positions", 90), ("segments", 4))
    }
    options = {"scale": 0.3, "window": 31, "softcap": None}
    ours = with_gradients(q, k, v, g, tokens, **options, backend=backend)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.parametrize("backend", BOTH)
def test_the_promise_of_aligned_rows_changes_nothing(backend):
    q, k, v, g, tokens, options = case("window and softcap")
    kept = with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=False)
    for one, other in zip(
        kept, with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=True), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_blocks_as_they_are_shipped(monkeypatch):
    """The sizes that are really used, at a length that fills one block and breaks another."""
    monkeypatch.undo()
    lengths = [[150, 101], [251]]
    q, k, v, g = normal(3, (2, 260, 6, 8), (2, 260, 2, 8), (2, 260, 2, 8), (2, 260, 6, 8))
    segments, positions = packed(lengths, 260)
    tokens = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}
    options = {"scale": 0.35, "window": None, "softcap": None}
    ours = with_gradients(q, k, v, g, tokens, **options, backend="blockwise", aligned=True)
    for mine, theirs in zip(ours, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.parametrize("backend", BOTH)
def test_rows_that_see_nothing_give_zero_and_no_gradient(backend):
    """Exactly zero, not nearly: a NaN or a stray gradient of padding would reach the weights."""
    q, k, v, g, tokens, options = case("padded")
    out, dq, dk, dv = with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=True)
    padding = tokens["q_segments"] == 0
    assert padding.any()
    for x in (out, dq, dk, dv):
        assert np.isfinite(x).all()
        assert not x[padding].any()


@pytest.mark.parametrize("backend", BOTH)
def test_nan_is_passed_on_to_those_who_see_it(backend):
    """A NaN must reach the loss, whatever way the greatest score is found; who does not see it stays as it was."""
    q, k, v, g, tokens, options = case("packed")
    clean = with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=True)[0]
    k = k.copy()
    k[0, 25] = np.nan  # a token of the third document of the first row
    out = with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=True)[0]
    sees = np.zeros(out.shape[:2], bool)
    sees[0, 25:51] = True
    assert np.isnan(out[sees]).all()
    np.testing.assert_array_equal(out[~sees], clean[~sees])


@pytest.mark.parametrize("backend", BOTH)
def test_another_document_cannot_be_felt(backend):
    """Bit for bit: changing one document of a row to huge numbers leaves its neighbours as they were."""
    q, k, v, g, tokens, options = case("packed")
    before = with_gradients(q, k, v, g, tokens, **options, backend=backend, aligned=True)
    other = tokens["q_segments"] == 3
    changed = [np.where(other[..., None, None], x * 100, x) for x in (q, k, v)]
    after = with_gradients(*changed, g, tokens, **options, backend=backend, aligned=True)
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[~other], two[~other])


@pytest.mark.parametrize("backend", BOTH)
def test_bfloat16_sums_in_float32(backend):
    """Against the float64 definition on the rounded inputs: only weights and the result are rounded, to 8 bits.

    A sum in bfloat16 over 1000 equal terms would stop growing at 256 and miss by far.
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
    exact = reference(*(np.asarray(x, np.float64) for x in (q, k, v)), **tokens, scale=1.0)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-7)


@pytest.mark.parametrize("aligned", [True, False])
def test_blockwise_program_holds_nothing_of_the_size_of_all_scores(aligned):
    """From the compiled forward and backward: no array is larger than the inputs, far less T * T."""
    T, h = 512, 4
    q, k, v, g = normal(5, (1, T, 2, h), (1, T, 1, h), (1, T, 1, h), (1, T, 2, h))
    segments, positions = packed([[T]], T)
    tokens = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}

    def largest(backend):
        def run(q, k, v, g):
            out, pull = jax.vjp(
                lambda *x: attention(*x, **tokens, scale=0.5, backend=backend, aligned=aligned), q, k, v
            )
            return out, pull(g)

        text = jax.jit(run).lower(q, k, v, g).compile().as_text()
        shapes = re.findall(r"\b(?:f32|f16|bf16|pred|s32)\[([\d,]+)\]", text)
        return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)

    assert largest("direct") >= T * T  # the test can see such an array
    assert largest("blockwise") <= 2 * T * h


def test_blockwise_computes_only_blocks_that_somebody_sees():
    """Counted while it runs: the loops' bounds for a packed row are those of its documents, not of its length."""
    T, block = 128, 16
    segments, positions = packed([[32, 32, 32, 32]], T)

    def count(window, segments, positions):
        tokens = blocks.TokenBlocks(*(x.reshape(1, -1, block).swapaxes(0, 1) for x in (positions, segments)))
        start, stop = blocks.true_range(blocks.any_visible(tokens, tokens, window))
        return int((stop - start).sum())

    assert count(None, segments, positions) == 4 * 3  # a triangle of 2 blocks in each of 4 documents
    whole_segments, whole_positions = packed([[T]], T)
    assert count(None, whole_segments, whole_positions) == 8 * 9 // 2
    assert count(16, whole_segments, whole_positions) == 8 + 7  # the diagonal and the one before it
    assert count(None, np.zeros_like(segments), positions) == 0


def test_checkpoint_policy_can_keep_the_output():
    """With the two names saved the forward loop is not run again: there is one loop less."""
    q, k, v, g, tokens, options = case("packed")

    def loops(policy):
        run = jax.checkpoint(
            lambda q, k, v: attention(q, k, v, **tokens, **options, backend="blockwise", aligned=True), policy=policy
        )
        gradient = jax.grad(lambda q, k, v: (run(q, k, v) * g).sum(), (0, 1, 2))
        return str(jax.make_jaxpr(gradient)(q, k, v)).count("scan[")

    keep = jax.checkpoint_policies.save_only_these_names(OUTPUT, LOG_SUM_EXP)
    assert loops(keep) == loops(jax.checkpoint_policies.nothing_saveable) - 1


def request_of(T, S=None, **changes):
    return AttentionRequest(
        **{
            "batch": 1, "q_length": T, "kv_length": S or T, "heads": 9, "kv_heads": 3, "head_dim": 64,
            "dtype": "float32", "platform": "cpu", "scale": 0.125, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("T", "S", "name"), [(128, 128, "direct"), (1, 40960, "direct"), (256, 256, "blockwise"), (1024, 1024, "blockwise")]
)
def test_auto_takes_direct_for_short_rows_and_decoding(T, S, name):
    backend, reason = choose_backend(request_of(T, S))
    assert backend.name == name
    assert reason


def test_a_new_backend_is_one_entry(monkeypatch):
    q, k, v, _, tokens, _ = case("one document")

    def supports(request):
        return "only sees windows" if request.window is None else None

    new = Backend("sevens", lambda inputs, request: jnp.full_like(inputs.q, 7.0), supports=supports)
    monkeypatch.setattr("meshtune.kernels.attention.BACKENDS", [new, *BACKENDS])
    assert (np.asarray(attention(q, k, v, **tokens, scale=1.0, window=3)) == 7.0).all()
    backend, reason = choose_backend(request_of(1024))
    assert backend.name == "blockwise"
    assert "only sees windows" in reason
    with pytest.raises(UserError, match="only sees windows"):
        attention(q, k, v, **tokens, scale=1.0, backend="sevens")


def test_a_forced_backend_that_cannot_serve_says_every_reason(monkeypatch):
    refusing = [
        Backend(name, lambda inputs, request: inputs.q, supports=lambda request, name=name: f"{name} is tired")
        for name in ("one", "two")
    ]
    monkeypatch.setattr("meshtune.kernels.attention.BACKENDS", refusing)
    for asked in ("two", "auto"):
        with pytest.raises(UserError) as error:
            choose_backend(request_of(8), asked)
        assert "one is tired" in str(error.value)
        assert "two is tired" in str(error.value)


def test_an_unknown_backend_is_an_error_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'blockwise'"):
        choose_backend(request_of(8), "blokwise")
