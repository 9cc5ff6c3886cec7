"""Searching: what wins, what stays pinned, what a recipe's auto comes to."""

from __future__ import annotations

import itertools
import time

import pytest
from llamas import llama

from meshtune.errors import UserError
from meshtune.plan.auto import settled_autos
from meshtune.plan.hardware import find_target
from meshtune.plan.knobs import smallest, tried
from meshtune.plan.search import open_keys, options


def searched(recipe, target):
    return options(recipe, find_target(target, env={}), open_keys(recipe, search=True))


def test_few_tokens_prefer_tp_and_many_prefer_fsdp(tmp_path):
    few = searched(llama(tmp_path, "405B", "data.max_length=64", "train.batch_size=16"), "8xMI300X")
    assert few[0].fits
    assert few[0].mesh.tp == 8, "gathering 405B of weights for a thousand tokens costs more than summing activations"
    many = searched(llama(tmp_path, "405B", "train.batch_size=64", "compute.remat=full"), "8xMI300X")
    assert many[0].fits
    assert many[0].mesh.fsdp * many[0].mesh.cp > many[0].mesh.tp


def test_a_search_takes_seconds(tmp_path):
    began = time.process_time()
    found = searched(llama(tmp_path, "70B", "train.batch_size=64", "method=full"), "2x8xA100-80")
    assert len(found) > 100
    assert time.process_time() - began < 60


def test_those_that_fit_come_first_by_time(tmp_path):
    found = searched(llama(tmp_path, "70B"), "8xA100-80")
    fitting = [one.fits for one in found]
    assert fitting == sorted(fitting, reverse=True)
    times = [one.roofline.seconds for one in found if one.fits]
    assert all(later > 0.97 * earlier for earlier, later in itertools.pairwise(times))


def test_what_the_recipe_sets_stays_as_it_is(tmp_path):
    recipe = llama(tmp_path, "8B", "mesh.tp=8", "compute.remat=full", "train.micro_batch=4")
    found = searched(recipe, "8xH100")
    assert {(one.mesh.tp, one.case.remat, one.case.rows) for one in found} == {(8, "full", 4)}
    assert all(set(one.overrides) <= {"compute.offload", "quantize"} for one in found)


def test_a_base_is_quantised_only_where_nothing_else_fits(tmp_path):
    assert "quantize" not in searched(llama(tmp_path, "70B"), "8xH100")[0].overrides
    assert "quantize" not in searched(llama(tmp_path, "405B"), "8xH100")[0].overrides, "weights may wait on the host"
    here = searched(llama(tmp_path, "405B", "compute.offload=[]", "compute.remat=full"), "8xH100")
    assert here[0].overrides["quantize"] == "nf4"
    full = searched(llama(tmp_path, "8B", "method=full"), "8xH100")
    assert all("quantize" not in one.overrides for one in full)


def test_auto_in_a_recipe_is_the_search_and_says_so(tmp_path):
    recipe = llama(tmp_path, "405B", "data.max_length=64", "train.batch_size=16", "train.micro_batch=auto")
    settled, choices = settled_autos(recipe, find_target("8xMI300X", env={}))
    assert settled.mesh.tp == 8
    assert isinstance(settled.train.micro_batch, int)
    assert settled.compute.remat in ("selective", "full")
    assert [choice.name for choice in choices] == ["mesh", "micro_batch", "remat"]
    assert all(choice.reason.startswith("auto: the fastest expected of") for choice in choices)
    assert choices[0].value == "tp=8"
    again, none = settled_autos(settled, find_target("8xMI300X", env={}))
    assert (again, none) == (settled, [])


def test_what_a_recipe_does_not_leave_open_is_not_touched(tmp_path):
    recipe = llama(tmp_path, "8B", "mesh.fsdp=8", "compute.remat=none", "train.micro_batch=8")
    assert settled_autos(recipe, find_target("8xH100", env={})) == (recipe, [])
    assert "train.micro_batch" not in open_keys(llama(tmp_path, "8B")), "unsaid, it is the whole batch"


def test_no_mesh_for_the_rows_says_how_many(tmp_path):
    recipe = llama(tmp_path, "8B", "train.batch_size=3", "data.max_length=7")
    with pytest.raises(UserError, match="no mesh of 5 devices fits 3 rows a micro-batch"):
        settled_autos(recipe, find_target("5xH100", env={}))


def test_knobs_are_turned_from_the_cheapest_and_those_not_needed_are_dropped(tmp_path):
    recipe = llama(tmp_path, "70B", "mesh.fsdp=8", "train.batch_size=64")
    target = find_target("8xA100-80", env={})
    start = options(recipe, target, frozenset({"compute.remat"}))[-1]
    assert not start.fits
    turned = tried(start, recipe)
    assert turned[0].name == "recompute layers"
    refused = {one.name: one.refusal for one in turned if one.option is None}
    assert refused.get("another mesh", "the recipe sets mesh") == "the recipe sets mesh"
    assert turned[-1].fits
    sizes = [one.option.estimate.device_bytes for one in turned[:-1] if one.option]
    assert sizes == sorted(sizes, reverse=True)
    assert turned[-1].option.estimate.device_bytes <= turned[-1].option.limit


def test_the_smallest_machine_holds_the_model_and_no_smaller_one_does(tmp_path):
    recipe = llama(tmp_path, "70B", "method=full", "train.batch_size=64")
    found = smallest(recipe, find_target("RTX4090", env={}))
    assert found is not None
    state = 70.55e9 * 4  # float32 weights stay on the devices, whatever is offloaded
    total = found.devices * found.device.memory
    assert state < total < 8 * state
