"""Plans of online stages: memory and time of rollouts, against compiled programs and numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from deviceless import compiled_for
from meshtune.arrays.tree import merge
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.costs.decoding import Lengths, decode_bytes
from meshtune.costs.hardware import Target, find_target
from meshtune.generate import programs
from meshtune.generate.request import Sampling
from meshtune.model.model_cache import cache_specs, rows_bucket
from meshtune.objectives.answers import without_critic
from meshtune.plan.program import step_of
from meshtune.plan.report import MAX_LENGTH, MEAN_LENGTH, lengths_of, report_for, to_json
from meshtune.plan.serving import serve_plan
from meshtune.setup.fit import MemoryCheck
from meshtune.setup.memory import FreeMemory
from meshtune.setup.search import ROWS, PredictedCandidate, apply_overrides, autotune, predict_candidate, workload_of

ROOT = pathlib.Path(__file__).parents[2]
HEADLINE = ROOT / "examples" / "headline"
H100 = find_target("H100", env={})


def predict(recipe: Recipe, target: Target = H100, **options) -> PredictedCandidate:
    return predict_candidate(recipe, target, workload_of(recipe, target.device.backend), **options)


def grpo_8b(*changes: str) -> Recipe:
    fixed = ["mesh.dp=1", "train.micro_batch=8", "compute.remat=full"]
    return load_recipe(str(HEADLINE / "8b-grpo-lora.yaml"), [*fixed, *changes])


def tiny(*changes: str) -> Recipe:
    fields = {
        "model": str(ROOT / "src/meshtune/quickstart/model"),
        "data": {"train": "none.jsonl", "max_length": 128},
        "stage": {"kind": "grpo"},
        "rollout": {"prompts": 2, "samples": 4, "max_tokens": 64},
        "rewards": [{"kind": "equals"}],
        "train": {"steps": 4, "micro_batch": 4},
        "mesh": {"dp": 1},
        "compute": {"remat": "full"},
        "output": "out",
    }
    return load_recipe(fields, list(changes))


def tree_bytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


PPO = ("stage=ppo", "stage.kl_coef=0")


@pytest.mark.parametrize(
    "changes",
    [(), ("method=full",), ("rollout.rows=2",), PPO, (*PPO, "method=full")],
    ids=["lora", "full", "two rows", "critic", "full critic"],
)
def test_a_compiled_decode_step_is_given_what_the_plan_counts(changes):
    """The state that a compiled update has for arguments, and the caches that a compiled decode step has beside it."""
    recipe = tiny(*changes)
    program, predicted = step_of(recipe), predict(recipe, find_target("CPU", env={}))
    state, frozen, _, _ = program.arguments
    cost = predicted.rollout
    assert cost is not None
    specs = cache_specs(program.run.spec, cost.rows, cost.slots, program.compute.dtype)
    layers = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), specs, is_leaf=lambda leaf: hasattr(leaf, "axes")
    )
    assert cost.rows == (2 if "rollout.rows=2" in changes else 8)
    assert cost.resident == pytest.approx(tree_bytes((state, frozen)), rel=1e-3)
    compiled = decode_program(program, layers, cost.rows)
    memory = compiled.memory_analysis()
    assert memory is not None
    weights = tree_bytes((without_critic(state.trainable), state.buffers, frozen))
    assert memory.argument_size_in_bytes == pytest.approx(weights + cost.caches, rel=1e-2)
    assert cost.caches == tree_bytes(layers)


def decode_program(program, layers, rows: int) -> jax.stages.Compiled:
    """A decode step over the parameters of a training program, as rollout.generate compiles it."""
    array: Any = jax.ShapeDtypeStruct
    state, frozen, _, _ = program.arguments
    compute = dataclasses.replace(program.compute, remat="none", attention="auto")
    switches, knobs = programs.compiled_form([Sampling(temperature=1.0)] * rows)
    switches = dataclasses.replace(switches, reports_drawn=True)
    numbers = array((rows,), np.int32)
    counts = programs.Counts(array((rows, 0), bool), array((rows, 0), np.int32))
    feed = programs.Feed(numbers, numbers, numbers, array((rows, 8), np.int32))
    knobs = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), knobs)
    params = merge(merge(without_critic(state.trainable), frozen), state.buffers)
    arguments = (params, layers, counts, feed, knobs, array((), np.int32), array((), bool))
    static = {"spec": program.run.spec, "compute": compute, "switches": switches, "alternatives": 0}
    return programs.decode.lower(*arguments, **static).compile()


def test_the_critics_part_of_a_step_is_counted():
    """What a compiled step of ppo holds beyond one of grpo: of its temporary arrays all but those of a layer and of the
    head exist twice. The counts of such arrays are fitted to GPUs' compilers, a CPU's has 10 % fewer here."""

    def sizes(stage: tuple[str, ...]) -> tuple[float, float, float]:
        recipe = tiny(*stage, "data.max_length=512", "compute.remat=none")
        program = step_of(recipe)
        memory = program.step.lower(*program.arguments).compile().memory_analysis()
        predicted = predict(recipe, find_target("CPU", env={}))
        assert memory is not None
        return memory.temp_size_in_bytes, predicted.estimate.device_bytes, predicted.estimate.breakdown["activations"]

    (temporary, _, before), (more, _, activations) = sizes(()), sizes(PPO)
    assert more - temporary == pytest.approx(activations - before, rel=0.15)
    assert activations > 1.8 * before


def test_a_critic_goes_through_the_layers_too():
    """In operations of an update: twice those of the layers, and once those of the head."""
    plain, critic = predict(grpo_8b()), predict(grpo_8b("stage=ppo", "rollout.samples=1", "rollout.prompts=64"))
    assert plain.roofline.tokens == critic.roofline.tokens
    head = plain.candidate.workload.spec.vocab * 4096 * 4 * plain.roofline.tokens
    assert critic.roofline.flops == pytest.approx(2 * plain.roofline.flops - head, rel=1e-3)
    assert plain.rollout is not None
    assert critic.rollout is not None
    assert critic.rollout.decoding == plain.rollout.decoding


def test_a_reward_model_is_counted_once(tmp_path):
    """Whole on a device, in float32 on a CPU: its parameters by transformers' count."""
    from transformers import AutoModelForCausalLM

    model = ROOT / "src/meshtune/quickstart/model"
    rewards = f"rewards=[{{kind: model, model: {model}}}, {{kind: model, model: {model}, name: again, weight: 2}}]"
    cpu = find_target("CPU", env={})
    without, with_model = predict(tiny(), cpu), predict(tiny(rewards), cpu)
    size = 4 * AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert with_model.estimate.device_bytes - without.estimate.device_bytes == size
    assert with_model.rollout is not None
    assert without.rollout is not None
    assert with_model.rollout.resident - without.rollout.resident == size


def test_the_peak_is_that_of_the_update_or_of_the_rollout():
    few, many = predict(grpo_8b("rollout.rows=8")), predict(grpo_8b("rollout.rows=64"))
    assert few.rollout is not None
    assert many.rollout is not None
    cache = 2 * 32 * 8 * 128 * 2 * 2048  # keys and values of 32 layers, 8 heads of 128, in bfloat16, for 2,048 tokens
    assert (few.rollout.caches, many.rollout.caches) == (8 * cache, 64 * cache)
    persistent = {
        role: size for role, size in few.estimate.breakdown.items() if role not in ("gradients", "activations")
    }
    assert few.rollout.resident == pytest.approx(sum(persistent.values()), rel=1e-6)
    for predicted in (few, many):
        assert predicted.rollout is not None
        assert predicted.device_bytes == max(predicted.estimate.device_bytes, predicted.rollout.device_bytes)
    assert few.device_bytes == few.estimate.device_bytes < many.device_bytes == many.rollout.device_bytes


def test_a_step_is_shorter_where_the_layers_fit_by_themselves():
    """14 GiB of an 8B's layers: they have room in an H100's memory, and not in 24 GB; no plan counts them."""
    recipe = grpo_8b("rollout.rows=8")
    large, small = (predict(recipe, find_target(name, env={})).rollout for name in ("H100", "RTX4090"))
    assert large is not None
    assert small is not None
    assert large.device_bytes == small.device_bytes
    assert large.decoding / small.decoding < find_target("RTX4090").device.bandwidth / H100.device.bandwidth / 2


@pytest.mark.parametrize(("target", "all_fit"), [("H100", True), ("RTX4090", False)])
def test_open_rows_are_the_most_that_fit(target, all_fit):
    machine = find_target(target, env={})
    recipe = grpo_8b("quantize=nf4", "train.micro_batch=1")
    predicted = predict(recipe, machine)
    assert predicted.rollout is not None
    assert predicted.fits
    assert (predicted.rollout.rows == 64) == all_fit
    resolved, decisions = autotune(recipe, machine)
    assert resolved.rollout is not None
    assert resolved.rollout.rows == predicted.rollout.rows
    (line,) = [choice for choice in decisions if choice.name == "rollout rows"]
    assert line.value == f"{predicted.rollout.rows} completions at once"
    assert predicted.shown_overrides == {ROWS: predicted.rollout.rows}
    if not all_fit:
        larger = next(n for n in range(predicted.rollout.rows + 1, 65) if rows_bucket(n) == n)
        assert not predict(apply_overrides(recipe, {ROWS: larger}), machine).fits


def test_a_decode_step_takes_as_long_as_serving_by_the_same_caches():
    """1,024 steps of 64 rows whose caches have 1,024 slots, then 2,048, by the times of `plan --serve` for these."""
    cost = predict(grpo_8b("rollout.rows=64")).rollout
    assert cost is not None
    recipe, options = grpo_8b(), {"rows": [64], "reserve": 0.0}
    short, long = (serve_plan(recipe, H100, length=length, **options).steps[0] for length in (1024, 2048))
    expected = (512 * 64 / short.expected) + (512 * 64 / long.expected)
    assert cost.decoding == pytest.approx(expected, rel=0.02)  # an adapter's matrices are not counted here
    assert cost.tokens_per_second == pytest.approx(64 * 1024 / cost.decoding)


def test_a_rollout_that_serves_several_updates_is_shared_among_them():
    cost = predict(grpo_8b("rollout.updates=2", "rollout.iterations=2", "train.micro_batch=4"))
    assert cost.rollout is not None
    assert cost.rollout.updates == 4
    assert cost.seconds == pytest.approx(cost.roofline.seconds + cost.rollout.seconds / 4)
    assert 0 < cost.rollout.scoring < 2 * cost.roofline.seconds  # of two updates' rows, without a backward pass


def test_only_filled_micro_batches_are_timed():
    """64 completions of 99 tokens after prompts of 102: 7 in a row of 1,536 if each has its prompt, 8 if they share."""
    short = Lengths(102, 99, 99, "here")
    alone = predict(grpo_8b("rollout.shared_prompts=false", "train.micro_batch=1"), lengths=short)
    shared = predict(grpo_8b("train.micro_batch=1"), lengths=short)
    unpacked = predict(grpo_8b("data.packing=false", "train.micro_batch=1"), lengths=short)
    counts = [predicted.rollout and predicted.rollout.micro_batches for predicted in (alone, shared, unpacked)]
    assert counts == [10, 8, 64]
    worst = predict(grpo_8b("train.micro_batch=1"))
    assert worst.rollout is not None
    assert worst.rollout.micro_batches == 64
    assert worst.estimate == shared.estimate  # memory is that of the worst case
    assert shared.roofline.seconds < 0.2 * worst.roofline.seconds


def test_a_run_tells_the_lengths_of_its_completions(tmp_path):
    recipe = tiny(f"output={tmp_path}", f"model.path={tmp_path}/elsewhere")
    assert lengths_of(recipe) is None
    lines = [
        {"kind": "eval", MEAN_LENGTH: 1.0, MAX_LENGTH: 1.0, "seconds": 1.0},
        {"kind": "train", MEAN_LENGTH: 10.0, MAX_LENGTH: 40.0, "memory": 1},
        {"kind": "train", MEAN_LENGTH: 20.0, MAX_LENGTH: 30.0, "memory": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lengths = lengths_of(recipe)
    assert lengths == Lengths(64.0, 15.0, 40.0, f"measured in {tmp_path}")


def test_a_report_shows_update_and_rollout_apart():
    recipe = grpo_8b("train.epochs=null", "train.steps=10")
    worst, measured = (report_for(recipe, H100, lengths=given) for given in (None, Lengths(512, 100, 200, "a run")))
    plan = to_json(measured)
    rollout = plan["rollout"]
    assert isinstance(rollout, dict)
    assert rollout["lengths"]["source"] == "a run"
    assert plan["device_bytes"] == worst.best.device_bytes
    assert measured.best.seconds < worst.best.seconds
    assert measured.run_seconds == pytest.approx(10 * (measured.best.roofline.seconds + rollout["seconds"]))


def test_a_reference_that_is_a_copy_is_counted():
    plain, copied = (predict(tiny("method=full", f"stage.beta={beta}")) for beta in (0, 0.1))
    trained = plain.candidate.local_bytes("full")
    assert copied.estimate.device_bytes == plain.estimate.device_bytes + int(trained)
    assert copied.rollout is not None
    assert plain.rollout is not None
    assert copied.rollout.resident == plain.rollout.resident + int(trained)
    ppo = ["method=full", "stage=ppo", "rollout.samples=1", "rollout.prompts=8"]
    without, with_copy = (predict(tiny(*ppo, f"stage.kl_coef={weight}")) for weight in (0, 0.1))
    assert with_copy.estimate.device_bytes == without.estimate.device_bytes + int(trained), "the critic has no copy"


def check(free: int, *changes: str) -> MemoryCheck:
    recipe = grpo_8b("rollout.max_tokens=1400", *changes)
    resolved = autotune(recipe, H100)[0]
    return MemoryCheck(recipe, resolved, H100, None, 1536, FreeMemory(free, 1 << 50, False))


def test_a_run_decodes_as_many_rows_as_fit_the_free_memory():
    assert check(70 << 30, "train.micro_batch=1").rollout_rows() == 64
    rows = check(24 << 30, "train.micro_batch=1").rollout_rows()
    assert rows is not None
    assert 8 <= rows < 32
    assert check(24 << 30, "train.micro_batch=1", "rollout.rows=64").rollout_rows() is None
    assert check(8 << 30, "train.micro_batch=1").rollout_rows() is None


def test_rows_that_do_not_fit_are_refused_with_rows_that_do():
    shortage = check(24 << 30, "train.micro_batch=1", "rollout.rows=64").before_loading()
    assert shortage is not None
    assert shortage.what.startswith("a rollout is expected to need about ")
    assert shortage.where == "rollout.rows: 64 rows of up to 2048 positions at once"
    change = (shortage.fix or "").split()[0]
    assert change.startswith("rollout.rows=")
    assert check(24 << 30, "train.micro_batch=1", change).before_loading() is None


# The 8B's prompts are read into some rows of caches, from abstract arrays, as `f` and `args`.
READ = """
from meshtune.arrays.spec import ArraySpec
from meshtune.config.load import load_recipe
from meshtune.generate import programs
from meshtune.model.compute import Compute
from meshtune.model.model_cache import READ_ROWS, cache_specs
from meshtune.model.spec import abstract_params
from meshtune.setup.search import workload_of

spec = workload_of(load_recipe(recipe, []), "cpu").spec
compute = Compute(dtype="bfloat16", platform="cuda")
is_spec = lambda leaf: isinstance(leaf, ArraySpec)
params = jax.tree.map(lambda leaf: array(leaf.shape, "bfloat16"), abstract_params(spec), is_leaf=is_spec)
specs = cache_specs(spec, rows, slots, "bfloat16")
layers = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), specs, is_leaf=is_spec)
numbers = array((READ_ROWS,), "int32")
args = (params, layers, array((READ_ROWS, 32), "int32"), numbers, numbers, numbers, numbers)
f = jax.jit(lambda *arguments: programs.read(*arguments, spec=spec, compute=compute), donate_argnums=(1,))
"""


@pytest.mark.deviceless
def test_rows_that_read_their_prompts_take_no_more_than_the_plan_says():
    """The caches of 16 of 64 rows exist twice more at most (measured: 1.23 times, activations included)."""
    facts = compiled_for("H100", READ, recipe=str(HEADLINE / "8b-lora-64k.yaml"), rows=64, slots=1024)
    readers = 16 * 1024 * 2 * 32 * 8 * 128 * 2
    assert readers < facts["temp_bytes"] < 2 * readers


# A decode step of a rollout over the parameters of a recipe's training program, as `f` and `args`.
DECODE = """
import dataclasses
from meshtune.arrays.tree import merge
from meshtune.config.load import load_recipe
from meshtune.generate import programs
from meshtune.generate.request import Sampling
from meshtune.model.model_cache import cache_specs
from meshtune.plan.program import step_of

program = step_of(load_recipe(recipe, changes), target, devices)
state, frozen, _, _ = program.arguments
spec, compute = program.run.spec, dataclasses.replace(program.compute, remat="none", attention="auto")
specs = cache_specs(spec, rows, slots, "bfloat16")
layers = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))
switches, knobs = programs.compiled_form([Sampling(temperature=1.0)] * rows)
numbers = array((rows,), "int32")
counts = programs.Counts(array((rows, 0), bool), array((rows, 0), "int32"))
feed = programs.Feed(numbers, numbers, numbers, array((rows, 8), "int32"))
knobs = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), knobs)
switches = dataclasses.replace(switches, reports_drawn=True)
static = {"spec": spec, "compute": compute, "switches": switches, "alternatives": 0}
params = merge(merge(state.trainable, frozen), state.buffers)
args = (params, layers, counts, feed, knobs, array((), "int32"), array((), bool))
f = jax.jit(lambda *arguments: programs.decode(*arguments, **static), donate_argnums=(1, 2))
"""


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "target", "rows", "compiled"), [("8b-grpo-qlora", "RTX4090", 32, 376), ("8b-grpo-lora", "H100", 64, 379)]
)
def test_a_decode_step_over_the_training_weights_takes_what_the_plan_says(name, target, rows, compiled):
    """As the accelerator's own compiler makes it, in MiB. The plan counts four copies of a layer's largest cache array,
    of which the kernel for stacked caches needs about one: a mesh and caches in 8 bits have them, and caches that grow
    take more."""
    path, machine = HEADLINE / f"{name}.yaml", find_target(target, env={})
    changes = ["mesh.dp=1", "train.micro_batch=1", "compute.remat=full", f"rollout.rows={rows}"]
    predicted = predict(load_recipe(str(path), changes), machine)
    cost, candidate = predicted.rollout, predicted.candidate
    assert cost is not None
    facts = compiled_for(target, DECODE, recipe=str(path), changes=changes, rows=rows, slots=cost.slots)
    weights = cost.resident - candidate.local_bytes("optimizer")
    assert facts["argument_bytes"] == pytest.approx(weights + cost.caches, rel=1e-4)
    assert facts["temp_bytes"] == pytest.approx(compiled << 20, rel=0.1)
    step = decode_bytes(candidate.workload.spec, candidate.layout, rows, cost.slots, "bfloat16")
    assert facts["temp_bytes"] < step < cost.temporaries
