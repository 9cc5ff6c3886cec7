"""Keys and values in 8 bits: codes against float64, the recalled arrays, and how far the model's output moves."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families.cases import BY_NAME
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.model.attention import AttentionSpec
from meshtune.model.cache import Cache, LayerCache, decode, encode
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.model_cache import cache_specs, check_cache, describe_cache, init_cache
from meshtune.model.spec import ModelSpec, init_params, stacks_of
from model_specs import llama_layer, llama_spec

LAYER = llama_layer(48, 4, 2, 8)
SPEC = llama_spec(64, 32, LAYER, 2, init_std=0.3)


def with_mixers(*changes: dict) -> ModelSpec:
    assert isinstance(LAYER.mixer, AttentionSpec)
    layers = [dataclasses.replace(LAYER, mixer=dataclasses.replace(LAYER.mixer, **change)) for change in changes]
    return dataclasses.replace(SPEC, stacks=stacks_of(layers))


WINDOW = with_mixers({"window": 5}, {"window": 5})
SHARED = with_mixers({"stores": "memory"}, {"reads": "memory"})


def spec_of(case: str) -> ModelSpec:
    return model_spec(BY_NAME[case].torch_config().to_dict())


def bytes_of(arrays) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_number_moves_by_more_than_half_its_scale(dtype):
    """Compiled, as caches are written. Magnitudes from 1e-31 to 1e30, a vector of zeros and one with an outlier."""
    values = np.random.default_rng(0).normal(size=(62, 16)) * 10.0 ** np.arange(-31, 31)[:, None]
    values = np.concatenate([values, np.zeros((1, 16)), [[300.0] + [0.5] * 15]])
    stored = jnp.asarray(values, dtype)
    codes, scales = jax.jit(encode)(stored)
    assert (codes.dtype, scales.dtype, codes.shape, scales.shape) == (jnp.int8, jnp.bfloat16, (64, 16), (64,))
    exact, scale = np.asarray(stored, np.float64), np.asarray(scales, np.float64)
    np.testing.assert_allclose(scale, np.abs(exact).max(1) / 127, rtol=2**-8)  # rounded to 8 bits of precision
    assert int(np.abs(np.asarray(codes, np.int32)).max()) == 127
    decoded = np.asarray(jax.jit(decode, static_argnums=2)(codes, scales, "float32"), np.float64)
    # 1e-5 of the scale: the quotient of two float32 numbers is itself rounded.
    assert (np.abs(decoded - exact) <= (0.5 + 1e-5) * scale[:, None]).all()
    np.testing.assert_array_equal(decoded, np.asarray(codes, np.float64) * scale[:, None])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_does_not_become_finite(wrong):
    decoded = decode(*encode(jnp.asarray([[1.0, wrong, -2.0], [1.0, 2.0, 3.0]])), "float32")
    assert not np.isfinite(np.asarray(decoded[0])).all()
    assert np.isfinite(np.asarray(decoded[1])).all()


@pytest.mark.parametrize("reach", [None, 5])
@pytest.mark.parametrize(
    "cuts", [[4, 11, 12, 13], *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ([13], [1, 2, 3, 13]))], ids=str
)
def test_tokens_are_recalled_as_their_codes_say_however_many_are_read_at_once(reach, cuts):
    """To the bit, in every slot, new tokens included; of a window the tokens that new ones see are all there."""
    values = {name: jax.random.normal(jax.random.key(n), (2, 13, 2, 8)) for n, name in enumerate("kv")}
    expected = {name: np.asarray(decode(*encode(array), "float32")) for name, array in values.items()}
    spec = with_mixers({"window": reach})
    arrays = init_cache(spec, 2, 16, "float32", cache="int8").layers["0.0"]
    assert arrays["k"].shape[3] == (reach or 16)
    start = 0
    for stop in cuts:
        cache = LayerCache(arrays, 0, jnp.full(2, start, jnp.int32))
        positions = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        new = {name: array[:, start:stop] for name, array in values.items()}
        past, places, following = cache.recall(new, positions, jnp.ones_like(positions, bool), reach)
        for row in range(2):
            filled = np.flatnonzero(np.asarray(places[row]) >= 0)
            tokens = np.asarray(places[row])[filled]
            assert set(range(max(0, start - (reach or 99) + 1), stop)) <= set(tokens.tolist())
            for name, array in past.items():
                assert array.dtype == jnp.float32
                np.testing.assert_array_equal(np.asarray(array[row])[filled], expected[name][row][tokens])
        arrays, start = following.arrays, stop


def rows(lengths: list[int], width: int) -> Inputs:
    tokens = np.random.default_rng(1).integers(0, 64, (len(lengths), width))
    real = np.arange(width) < np.asarray(lengths)[:, None]
    positions = np.where(real, np.arange(width), 0)
    return Inputs(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(real, jnp.int32))


@pytest.mark.parametrize(
    "spec", [pytest.param(SPEC, marks=pytest.mark.slow), WINDOW, SHARED], ids=["full", "window", "shared"]
)
def test_the_model_sees_nearly_what_it_sees_over_a_float_cache(spec):
    """Keys and values of the first layer, which are computed of the same numbers, are those of the float cache within
    half a scale. Logits of these random weights, of a standard deviation of 1.6, move by 0.015 in the mean and 0.23 at
    most; the limits are twice that."""
    params, inputs = init_params(spec, jax.random.key(1)), rows([20, 11], 20)
    after, scores = {}, {}

    @jax.jit
    def read(params, cache):
        result = forward(params, spec, Compute(), inputs, cache=cache)
        return logits(params, spec, result.hidden), result.cache

    for cache in (None, "int8"):
        scores[cache], after[cache] = read(params, init_cache(spec, 2, 24, "float32", cache=cache))
    plain, codes = (after[cache].layers["0.0"] for cache in (None, "int8"))
    for name in "kv":
        scale = np.asarray(codes[f"{name}_scale"][0], np.float32)[..., None]
        decoded = np.asarray(codes[name][0], np.float32) * scale
        difference = np.abs(decoded - np.asarray(plain[name][0]))
        assert difference.max() > 0
        assert (difference <= (0.5 + 1e-3) * scale).all()
    real = np.asarray(inputs.segment_ids) > 0
    difference = np.abs(np.asarray(scores["int8"]) - np.asarray(scores[None]))[real]
    assert 0 < difference.mean() < 0.03
    assert difference.max() < 0.46


@pytest.mark.parametrize(("dtype", "share"), [("float32", (64 + 2) / 256), ("bfloat16", (64 + 2) / 128)])
def test_a_coded_cache_takes_its_share_of_the_memory(dtype, share):
    spec = llama_spec(64, 32, llama_layer(48, 4, 2, 64, window=7), 3)
    plain, codes = (init_cache(spec, 2, 24, dtype, cache=cache).layers for cache in (None, "int8"))
    assert bytes_of(codes) / bytes_of(plain) == share
    arrays = cache_specs(spec, 2, 24, dtype, "int8")["0.0"]
    assert arrays["k"].axes == ("layers", "batch", "kv_heads", "slots", "head_dim")
    assert arrays["k_scale"].axes == arrays["k"].axes[:-1]
    assert arrays["k_scale"].shape == (3, 2, 2, 7)


@pytest.mark.parametrize(("case", "arrays"), [("deepseek_v2", "latent, rotated"), ("mamba2", "state, conv_inputs")])
def test_a_cache_of_something_else_is_refused_by_name(case, arrays):
    with pytest.raises(UserError, match=rf"this model \({spec_of(case).family}\) has none .* which holds: {arrays}"):
        check_cache(spec_of(case), "int8")
    assert check_cache(spec_of(case), None) is None


def test_an_unknown_format_is_refused():
    with pytest.raises(UserError, match="'fp8' is not supported"):
        check_cache(SPEC, "fp8")


@pytest.mark.parametrize(
    ("case", "description"),
    [
        ("lfm2", "keys and values of 2 of 6 layers in int8; conv_inputs as without it"),
        ("qwen3_5", "keys and values of 1 of 4 layers in int8; state, conv_inputs as without it"),
        ("falcon_h1", "keys and values of 2 of 2 layers in int8; state, conv_inputs as without it"),
        ("qwen3", "keys and values in int8"),
    ],
)
def test_of_a_hybrid_attention_layers_alone_are_coded(case, description):
    spec = spec_of(case)
    codes = check_cache(spec, "int8")
    assert describe_cache(spec, codes, "float32") == description
    assert describe_cache(spec, None, "float32") == "float32"
    plain, coded = (flatten(cache_specs(spec, 1, 4, "float32", cache)) for cache in (None, codes))
    attention = {path for path in plain if path.endswith(("/k", "/v"))}
    assert {path: coded[path] for path in plain.keys() - attention} == {
        path: plain[path] for path in plain.keys() - attention
    }
    assert coded.keys() - plain.keys() == {f"{path}_scale" for path in attention}
    assert {coded[path].dtype for path in attention} == {"int8"}


def test_a_decode_step_decodes_one_layer_at_a_time():
    """Counted from the compiled program: besides the cache it takes as much as a step over a float cache, the keys and
    values of one layer."""
    spec = llama_spec(64, 32, llama_layer(48, 4, 2, 64), 8)
    params, layer_bytes = init_params(spec, jax.random.key(0)), 2 * 4 * 2 * 1024 * 2 * 64

    @partial(jax.jit, donate_argnums=0)
    def step(layers: dict, lengths: jax.Array):
        ones = jnp.ones((2, 1), jnp.int32)
        cache = Cache(layers, lengths)
        return forward(params, spec, Compute(), Inputs(ones, lengths[:, None], ones), cache=cache).cache

    for cache in (None, "int8"):
        layers = init_cache(spec, 2, 1024, "float32", cache=cache).layers
        memory = step.lower(layers, jnp.zeros(2, jnp.int32)).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 1.2 * layer_bytes
