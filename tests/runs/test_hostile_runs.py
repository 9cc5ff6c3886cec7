"""Files of a run, and those next to a model, that a stranger wrote: they end in a sentence, or are passed over."""

from __future__ import annotations

import json
import os

import pytest

from meshtune.digests import FILE, DamagedError, read_digests
from meshtune.errors import UserError
from meshtune.hub.card import front_matter
from meshtune.json_text import token_ids
from meshtune.runs.sources import best_step
from meshtune.train.report.page import _recipe

# Each level merges the one before it twice.
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))


def test_merges_of_merges_in_a_recipe_or_a_card_end_at_once(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"---\n{MERGES}---\nA model.\n")
    assert front_matter(card) == {}
    assert "".join(_recipe(MERGES)).count("a39")


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", '{"files": [1]}', "\xff", '{"files": {"a": 1}}', "pipe"])
def test_digests_that_are_none_are_damaged(content, tmp_path):
    file = tmp_path / FILE
    if content == "pipe":
        os.mkfifo(file)
    else:
        file.write_text(content, encoding="latin-1")
    with pytest.raises(DamagedError, match="not what was written"):
        read_digests(tmp_path)


@pytest.mark.parametrize("best", [[1], {"step": "x"}, {"step": 1e400}, "3", {}])
def test_a_best_state_that_is_none_is_none(best, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"best": best}))
    assert best_step(tmp_path) is None


@pytest.mark.parametrize("value", [2**31, -1, 1.0, True, "2", [1, None]])
def test_ids_of_tokens_are_whole_numbers_that_tensors_hold(value):
    with pytest.raises(UserError, match="expected the number of a token"):
        token_ids(value, "config.json")
