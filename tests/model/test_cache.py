"""Caches of mixers: slots by position, a length for every row, a window's worth for a window."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.model import decoder
from meshtune.model.cache import LayerCache, grown
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs
from meshtune.model.model_cache import cache_specs, init_cache
from meshtune.model.spec import init_params
from model_specs import llama_layer, llama_spec

LAYER = llama_layer(48, 4, 2, 8)
SPEC = llama_spec(64, 32, LAYER, 2, init_std=0.3)
WINDOW = llama_spec(
    64, 32, dataclasses.replace(LAYER, mixer=dataclasses.replace(LAYER.mixer, window=5)), 2, init_std=0.3
)


def rows_of(lengths, width):
    """Rows of random tokens, filled up on the right with segment 0."""
    tokens = np.random.default_rng(0).integers(0, 64, (len(lengths), width))
    real = np.arange(width) < np.asarray(lengths)[:, None]
    return Inputs(*(jnp.asarray(array, jnp.int32) for array in (tokens, np.where(real, np.arange(width), 0), real)))


forward = jax.jit(decoder.forward, static_argnums=(1, 2))


def part(inputs, start, stop):
    return Inputs(*(array[:, start:stop] for array in (inputs.tokens, inputs.positions, inputs.segment_ids)))


def test_a_window_keeps_a_windows_worth_and_other_layers_all():
    for spec, slots in ((SPEC, 40), (WINDOW, 5)):
        (arrays,) = cache_specs(spec, 3, 40, "bfloat16").values()
        assert {array.shape for array in arrays.values()} == {(2, 3, 2, slots, 8)}
        assert arrays["k"].axes == ("layers", "batch", "kv_heads", "slots", "head_dim")


@pytest.mark.parametrize("spec", [SPEC, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize(
    "cuts",
    [
        [20],
        [4, 11, 12, 13, 19, 20],
        *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ([12, 20], [1, 2, 3, 20])),
    ],
    ids=str,
)
def test_rows_read_in_parts_are_the_rows_read_at_once(spec, cuts):
    """Whatever the parts, also several tokens at once over a window that they overflow."""
    params, compute, inputs = init_params(spec, jax.random.key(1)), Compute(), rows_of([20, 20], 20)
    expected = forward(params, spec, compute, inputs).hidden
    cache, start, outputs = init_cache(spec, 2, 20, "float32"), 0, []
    for cut in cuts:
        hidden, cache, _ = forward(params, spec, compute, part(inputs, start, cut), cache=cache)
        outputs.append(hidden)
        start = cut
    assert cache.lengths.tolist() == [20, 20]
    # float32, softmax over the same keys in another order.
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("spec", [SPEC, WINDOW], ids=["full", "window"])
def test_padding_takes_no_slot_and_rows_have_their_own_lengths(spec):
    params, compute, inputs = init_params(spec, jax.random.key(1)), Compute(), rows_of([3, 9], 12)
    _, cache, _ = forward(params, spec, compute, inputs, cache=init_cache(spec, 2, 12, "float32"))
    assert cache.lengths.tolist() == [3, 9]
    following = Inputs(jnp.asarray([[7], [8]]), cache.lengths[:, None], jnp.ones((2, 1), jnp.int32))
    hidden, cache, _ = forward(params, spec, compute, following, cache=cache)
    assert cache.lengths.tolist() == [4, 10]
    for row, length in enumerate([3, 9]):
        alone = jnp.concatenate([inputs.tokens[row, :length], following.tokens[row]])[None]
        place = jnp.arange(length + 1)[None]
        expected = forward(params, spec, compute, Inputs(alone, place, jnp.ones_like(alone))).hidden[0, -1]
        np.testing.assert_allclose(hidden[row, 0], expected, rtol=2e-5, atol=2e-5)


def test_a_finished_row_is_not_written_to():
    params, compute, inputs = init_params(SPEC, jax.random.key(1)), Compute(), rows_of([4, 4], 4)
    _, before, _ = forward(params, SPEC, compute, inputs, cache=init_cache(SPEC, 2, 8, "float32"))
    step = Inputs(jnp.ones((2, 1), jnp.int32), jnp.full((2, 1), 4), jnp.asarray([[0], [1]]))
    _, after, _ = forward(params, SPEC, compute, step, cache=before)
    assert after.lengths.tolist() == [4, 5]
    for name in ("k", "v"):
        np.testing.assert_array_equal(after.layers["0.0"][name][:, 0], before.layers["0.0"][name][:, 0])
        assert not np.array_equal(after.layers["0.0"][name][:, 1], before.layers["0.0"][name][:, 1])


def test_a_cache_that_has_grown_holds_what_it_held():
    params, compute, inputs = init_params(SPEC, jax.random.key(1)), Compute(), rows_of([6], 8)
    _, cache, _ = forward(params, SPEC, compute, part(inputs, 0, 6), cache=init_cache(SPEC, 1, 6, "float32"))
    step = Inputs(jnp.asarray([[3]]), jnp.asarray([[6]]), jnp.asarray([[1]]))
    larger = grown(cache, cache_specs(SPEC, 1, 16, "float32"))
    _, wide, _ = forward(params, SPEC, compute, part(inputs, 0, 6), cache=init_cache(SPEC, 1, 16, "float32"))
    ours, theirs = (forward(params, SPEC, compute, step, cache=state).hidden for state in (larger, wide))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)  # the prompt was read over another number of slots


def test_slots_say_which_token_they_hold():
    """By hand: five slots, and rows of 0, 3, 5 and 12 tokens."""
    view = LayerCache({"k": jnp.zeros((1, 4, 5, 1))}, 0, jnp.zeros(4, jnp.int32))
    expected = [[-1] * 5, [0, 1, 2, -1, -1], [0, 1, 2, 3, 4], [10, 11, 7, 8, 9]]
    assert view.slot_positions("k", jnp.asarray([0, 3, 5, 12])).tolist() == expected
