"""The card of a run whose data a registry names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
import yaml

from meshtune.hub.card import Base, Subject, model_card, run_facts
from meshtune.runs.output import RECIPE

BASE = Base("stories", "org/stories", "org/stories", None, None, None)


@pytest.fixture
def named_run(finished_run, tmp_path):
    """The finished run as one that named its data in a registry, and the folder of that registry."""
    run, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(finished_run, run)
    data.mkdir()
    (data / "lesson.json").write_text("[]")
    os.utime(data / "lesson.json", (1, 1))
    entries = {"lesson": {"file_name": "lesson.json"}, "public": {"hf_hub_url": "org/lessons"}}
    (data / "dataset_info.json").write_text(json.dumps(entries))
    recipe = yaml.safe_load((run / RECIPE).read_text())
    recipe["data"] |= {"registry": str(data), "train": [{"name": "lesson"}, {"name": "public"}]}
    (run / RECIPE).write_text(yaml.safe_dump(recipe))
    return run, data


def test_entries_of_a_registry_are_files_with_hashes_and_data_sets_of_the_hub(named_run):
    run, _ = named_run
    file, hub = run_facts(run, BASE).data
    assert (file.name, file.sha256) == ("lesson.json", hashlib.sha256(b"[]").hexdigest())
    assert (hub.name, hub.hub) == ("org/lessons", True)


def test_a_file_that_was_replaced_after_the_run_has_no_hash(named_run, tmp_path):
    """Its time of writing says nothing: copies may keep that of what they are copies of."""
    run, data = named_run
    replacement = tmp_path / "other.json"
    replacement.write_text("[1]")
    os.utime(replacement, (1e9, 1e9))
    shutil.copy2(replacement, data / "lesson.json")
    recipe = (run / RECIPE).stat().st_mtime - 10
    os.utime(run / RECIPE, (recipe, recipe))
    assert run_facts(run, BASE).data[0].sha256 is None


def test_entries_have_their_names_where_the_registry_is_gone(named_run):
    run, data = named_run
    shutil.rmtree(data)
    assert [(fact.name, fact.sha256) for fact in run_facts(run, BASE).data] == [("lesson", None), ("public", None)]


def test_rank_and_alpha_are_said(finished_run):
    facts = run_facts(finished_run, BASE)
    card = model_card(Subject("ann/lesson", "adapter", BASE, facts, []))
    assert f"(lora, rank {facts.rank}, alpha {facts.alpha:g}) in 3 updates." in card
