"""Serving by plan, against numbers worked out by hand from published configs."""

from __future__ import annotations

import math
import pathlib

import jax
import pytest

from deviceless import compiled_for
from meshtune.config.load import load_recipe
from meshtune.costs.hardware import find_target
from meshtune.errors import UserError
from meshtune.plan.serving import ServePlan, serve_plan

HEADLINE = pathlib.Path(__file__).parents[2] / "examples" / "headline"
# Llama 3.1 8B: 32 layers of 4096, 8 key-value heads of 128, feed-forward networks of 14336, vocabulary 128256.
LAYERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
VOCAB, NORMS = 4096 * 128256, 65 * 4096
BANDWIDTH = 3.352e12  # of an H100 SXM, B/s
CACHE = 2 * 32 * 8 * 128 * 2  # bytes of a token


def plan_serving(target: str, recipe: str = "8b-lora-64k.yaml", **options) -> ServePlan:
    options = {"rows": [1, 64], "length": 4096, "reserve": 0.0} | options
    loaded = load_recipe(str(HEADLINE / recipe), [])
    return serve_plan(loaded, find_target(target), **options)


def test_8b_on_an_h100_reads_its_weights_and_caches():
    plan = plan_serving("H100")
    adapter = plan.weights - 2 * (LAYERS + 2 * VOCAB + NORMS)
    assert 0 < adapter < 0.01 * plan.weights
    assert plan.cache_row == CACHE * 4096
    for step in plan.steps:
        read = plan.weights - 2 * VOCAB + step.rows * CACHE * 4096  # of the embedding, only the rows of the tokens
        assert step.weight_bytes + step.cache_bytes == pytest.approx(read)
        assert step.memory_seconds == pytest.approx(read / BANDWIDTH)
        attention = 4 * 32 * 4096 * 4096  # scores and values of 32 layers, 4096 numbers of queries, 4096 tokens
        assert step.operations == pytest.approx(step.rows * (2 * (LAYERS + VOCAB) + attention))
        assert step.bound == pytest.approx(step.rows / step.memory_seconds)
        assert step.expected == pytest.approx(0.8 * step.bound)
    room = find_target("H100").device.memory - plan.weights
    step = 4 * CACHE * 4096 / 2 / 32 + 12 * 128256  # four times a layer's keys, three times the logits
    assert plan.step_row == step
    assert plan.most_rows == int(room / (CACHE * 4096 + step))
    assert [step.fits for step in plan_serving("H100", rows=[plan.most_rows, plan.most_rows + 1]).steps] == [
        True,
        False,
    ]


def test_layers_are_written_out_where_their_copy_does_not_fit():
    """14 GiB of layers: beside 15 GiB of weights in 80 GB with few rows, and not in 24 GB."""
    large, small = plan_serving("H100", rows=[1, 256]), plan_serving("RTX4090", rows=[1])
    layers = 2 * LAYERS
    assert [step.again_bytes for step in large.steps] == [0, pytest.approx(2 * layers, rel=0.01)]
    assert small.steps[0].again_bytes == pytest.approx(2 * layers, rel=0.01)
    assert small.steps[0].expected < 0.4 * small.steps[0].bound


def test_devices_split_weights_and_caches_as_tp_does():
    single, eight = plan_serving("H100"), plan_serving("8xH100")
    assert eight.cache_row == single.cache_row / 8
    assert eight.weights == pytest.approx(single.weights / 8, rel=0.01)


def test_a_quantised_base_reads_its_codes():
    plain, nf4 = plan_serving("H100"), plan_serving("H100", "8b-qlora.yaml")
    assert nf4.weights < 0.4 * plain.weights


def test_a_mixture_reads_the_experts_that_are_chosen():
    """One row of Qwen3 30B-A3B is sent to 8 of 128 experts of a layer, 256 rows to nearly all of them."""
    plan = plan_serving("H100", "qwen3-30b-a3b-lora.yaml", rows=[1, 256])
    single, many = plan.steps
    assert single.weight_bytes < 0.13 * plan.weights
    assert many.weight_bytes > 0.97 * plan.weights


def test_an_int8_cache_is_counted_in_codes_and_scales():
    """Of a head's 128 numbers 128 bytes of codes and two of a scale, in place of 256, in memory and in bytes read."""
    plain, coded = plan_serving("8xH100"), plan_serving("8xH100", cache="int8")
    assert (plain.cache, coded.cache) == ("bfloat16", "keys and values in int8")
    assert coded.cache_row == CACHE * 4096 / 8 * 130 / 256
    assert coded.weights == plain.weights
    assert coded.most_rows > 1.8 * plain.most_rows
    for before, after in zip(plain.steps, coded.steps, strict=True):
        assert after.cache_bytes == before.cache_bytes * 130 / 256
        assert after.bound > before.bound


def test_a_plan_says_which_layers_of_a_hybrid_are_in_codes():
    plan = plan_serving("H200", "qwen3.5-27b-qlora-32k.yaml", cache="int8")
    assert plan.cache == "keys and values of 16 of 64 layers in int8; state, conv_inputs as without it"


def test_a_cache_of_latents_is_refused():
    with pytest.raises(UserError, match=r"has none in its cache, which holds: latent, rotated"):
        plan_serving("8xH200", "deepseek-v3-qlora-8xH200.yaml", cache="int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [0]}, "above 0"),
        ({"length": 0}, "above 0"),
        ({"cache": "int4"}, "a cache in 'int4' is not supported"),
        ({"length": 10**7}, "beyond the model's context"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        plan_serving("H100", **options)


# A decode step of `rows` rows of `length` tokens, from abstract arrays of the 8B, as `f` and `args`.
DECODE = """
from meshtune.arrays.spec import ArraySpec
from meshtune.config.load import load_recipe
from meshtune.generate import programs
from meshtune.generate.request import Sampling
from meshtune.generate.programs import Counts, compiled_form
from meshtune.model.compute import Compute
from meshtune.model.model_cache import cache_specs
from meshtune.model.spec import abstract_params
from meshtune.setup.search import workload_of

spec = workload_of(load_recipe(recipe, []), "cpu").spec
compute = Compute(dtype="bfloat16", cache=cache, platform=platform)
is_spec = lambda leaf: isinstance(leaf, ArraySpec)
params = jax.tree.map(lambda leaf: array(leaf.shape, "bfloat16"), abstract_params(spec), is_leaf=is_spec)
specs = cache_specs(spec, rows, length, "bfloat16", cache)
layers = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), specs, is_leaf=is_spec)
switches, knobs = compiled_form([Sampling()] * rows)
counts = Counts(array((rows, 0), bool), array((rows, 0), "int32"))
numbers = array((rows,), "int32")
feed = programs.Feed(numbers, numbers, numbers, array((rows, 8), "int32"))
knobs = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), knobs)
static = {"spec": spec, "compute": compute, "switches": switches, "alternatives": None}
step = lambda *arguments: programs.decode(*arguments, **static)
f = jax.jit(step, donate_argnums=(1, 2))
args = (params, layers, counts, feed, knobs, array((), "int32"), array((), bool))
"""


def check_bytes(argument_bytes: int, rows: int, cache: str | None) -> None:
    """The program's arguments are those that the plan counts; besides, there are positions and sampling numbers of
    rows, far below a thousandth."""
    plan = plan_serving("H100", rows=[rows], length=1024, cache=cache)
    base = 2 * (LAYERS + 2 * VOCAB + NORMS)
    assert argument_bytes == pytest.approx(base + rows * plan.cache_row, rel=1e-3)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_compiled_decode_step_is_given_the_weights_and_caches_of_the_plan(cache):
    """The 8B at 64 rows, lowered for a CPU."""
    space = {
        "recipe": str(HEADLINE / "8b-lora-64k.yaml"),
        "rows": 64,
        "length": 1024,
        "cache": cache,
        "platform": "cpu",
    }
    space |= {"jax": jax, "array": jax.ShapeDtypeStruct}
    exec(DECODE, space)
    leaves = jax.tree.leaves(space["f"].lower(*space["args"]).in_avals)
    check_bytes(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves), 64, cache)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("target", "platform", "cache"), [("H100", "cuda", None), ("H100", "cuda", "int8"), ("MI300X", "rocm", None)]
)
def test_a_decode_step_fits_where_the_plan_says_so(target, platform, cache):
    """The 8B at 64 rows of 1,024 tokens as the accelerator's own compiler makes it: arguments as counted, and
    temporaries within 5% of the plan's (measured: 4.3% more)."""
    values = {"recipe": str(HEADLINE / "8b-lora-64k.yaml"), "rows": 64, "length": 1024, "cache": cache}
    facts = compiled_for(target, DECODE, platform=platform, **values)
    check_bytes(facts["argument_bytes"], 64, cache)
    plan = plan_serving(target, length=1024, cache=cache)
    assert facts["temp_bytes"] == pytest.approx(64 * plan.step_row, rel=0.05)
    assert facts["alias_bytes"] == pytest.approx(64 * plan.cache_row, rel=1e-3)  # the caches are changed in place
