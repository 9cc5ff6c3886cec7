"""The search: which candidate wins, which keys are fixed, how `auto` is resolved, and remedies."""

from __future__ import annotations

import itertools
import time

import pytest
from llamas import llama

from meshtune.costs.hardware import find_target
from meshtune.errors import UserError
from meshtune.setup.fit import smallest_machine, try_remedies
from meshtune.setup.search import autotune, open_keys, rank_candidates


def search(recipe, target):
    return rank_candidates(recipe, find_target(target, env={}), open_keys(recipe, search=True))


def test_few_tokens_prefer_tp_and_many_prefer_fsdp(tmp_path):
    few = search(llama(tmp_path, "405B", "data.max_length=64", "train.batch_size=16"), "8xMI300X")
    assert few[0].fits
    assert few[0].mesh.tp == 8, "gathering 405B of weights for a thousand tokens costs more than summing activations"
    many = search(llama(tmp_path, "405B", "train.batch_size=64", "compute.remat=full"), "8xMI300X")
    assert many[0].fits
    assert many[0].mesh.fsdp * many[0].mesh.cp > many[0].mesh.tp


def test_a_search_takes_seconds(tmp_path):
    start = time.process_time()
    candidates = search(llama(tmp_path, "70B", "train.batch_size=64", "method=full"), "2x8xA100-80")
    assert len(candidates) > 100
    assert time.process_time() - start < 60


def test_candidates_that_fit_come_first_by_time(tmp_path):
    candidates = search(llama(tmp_path, "70B"), "8xA100-80")
    fitting = [predicted.fits for predicted in candidates]
    assert fitting == sorted(fitting, reverse=True)
    times = [predicted.roofline.seconds for predicted in candidates if predicted.fits]
    assert all(later > 0.97 * earlier for earlier, later in itertools.pairwise(times))


def test_keys_that_the_recipe_sets_are_not_changed(tmp_path):
    recipe = llama(tmp_path, "8B", "mesh.tp=8", "compute.remat=full", "train.micro_batch=4")
    candidates = search(recipe, "8xH100")
    assert {(s.mesh.tp, s.candidate.remat, s.candidate.rows) for s in candidates} == {(8, "full", 4)}
    assert all(set(predicted.overrides) <= {"compute.offload", "quantize"} for predicted in candidates)


def test_a_base_is_quantised_only_where_nothing_else_fits(tmp_path):
    assert "quantize" not in search(llama(tmp_path, "70B"), "8xH100")[0].overrides
    assert "quantize" not in search(llama(tmp_path, "405B"), "8xH100")[0].overrides, (
        "weights may be offloaded to the host"
    )
    no_offload = search(llama(tmp_path, "405B", "compute.offload=[]", "compute.remat=full"), "8xH100")
    assert no_offload[0].overrides["quantize"] == "nf4"
    full = search(llama(tmp_path, "8B", "method=full"), "8xH100")
    assert all("quantize" not in predicted.overrides for predicted in full)


def test_auto_in_a_recipe_is_resolved_by_the_search(tmp_path):
    recipe = llama(tmp_path, "405B", "data.max_length=64", "train.batch_size=16", "train.micro_batch=auto")
    resolved, choices = autotune(recipe, find_target("8xMI300X", env={}))
    assert resolved.mesh.tp == 8
    assert isinstance(resolved.train.micro_batch, int)
    assert resolved.compute.remat in ("selective", "full")
    assert [choice.name for choice in choices] == ["mesh", "micro_batch", "remat"]
    assert all(choice.reason.startswith("auto: expected to be the fastest of") for choice in choices)
    assert choices[0].value == "tp=8"
    unchanged, no_choices = autotune(resolved, find_target("8xMI300X", env={}))
    assert (unchanged, no_choices) == (resolved, [])


def test_a_recipe_without_open_keys_is_unchanged(tmp_path):
    recipe = llama(tmp_path, "8B", "mesh.fsdp=8", "compute.remat=none", "train.micro_batch=8")
    assert autotune(recipe, find_target("8xH100", env={})) == (recipe, [])
    assert "train.micro_batch" not in open_keys(llama(tmp_path, "8B")), "unset, it is the whole batch"


def test_a_batch_that_no_mesh_divides_is_refused(tmp_path):
    recipe = llama(tmp_path, "8B", "train.batch_size=3", "data.max_length=7")
    with pytest.raises(UserError, match="no mesh of 5 devices fits 3 rows a micro-batch"):
        autotune(recipe, find_target("5xH100", env={}))


def test_remedies_are_tried_from_the_cheapest_until_the_run_fits(tmp_path):
    recipe = llama(tmp_path, "70B", "mesh.fsdp=8", "train.batch_size=64")
    target = find_target("8xA100-80", env={})
    start = rank_candidates(recipe, target, frozenset({"compute.remat"}))[-1]
    assert not start.fits
    remedies = try_remedies(start, recipe)
    assert remedies[0].name == "recompute layers"
    refused = {remedy.name: remedy.refusal for remedy in remedies if remedy.predicted is None}
    assert refused.get("another mesh", "the recipe sets mesh") == "the recipe sets mesh"
    assert remedies[-1].fits
    sizes = [remedy.predicted.estimate.device_bytes for remedy in remedies[:-1] if remedy.predicted]
    assert sizes == sorted(sizes, reverse=True)
    assert remedies[-1].predicted.estimate.device_bytes <= remedies[-1].predicted.memory_limit


def test_the_smallest_machine_holds_the_model_and_no_smaller_one_does(tmp_path):
    recipe = llama(tmp_path, "70B", "method=full", "train.batch_size=64")
    machine = smallest_machine(recipe, find_target("RTX4090", env={}))
    assert machine is not None
    state = 70.55e9 * 4  # float32 weights stay on the devices with any offloading
    total = machine.devices * machine.device.memory
    assert state < total < 8 * state
