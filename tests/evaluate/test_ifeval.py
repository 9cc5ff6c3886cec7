"""IFEval from its published file, against lm-eval's transformers backend; and the error where it cannot run."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("lm_eval", reason="the extra evaluate is not installed")
pytest.importorskip("nltk", reason="the extra evaluate is not installed")

import nltk.data
from test_harness import QUIET, by_transformers, check_same

import meshtune
from meshtune.errors import UserError
from meshtune.evaluate.harness import Suite, prepare, run_tasks

RECORDS = [
    ("Write at least three sentences about a dog.", "length_constraints:number_sentences", ["at least", 3]),
    ("Write about a cat. Use no commas.", "punctuation:no_comma", []),
    ("Answer in English, in lower case.", "change_case:english_lowercase", []),
]
NAMES = ("relation", "num_sentences")


@pytest.fixture
def suite(tmp_path):
    file = tmp_path / "input_data.jsonl"
    lines = [
        {"key": n, "prompt": prompt, "instruction_id_list": [kind], "kwargs": [dict(zip(NAMES, values, strict=False))]}
        for n, (prompt, kind, values) in enumerate(RECORDS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Suite(("ifeval",), {"ifeval": file}, gen_kwargs={"max_gen_toks": 40})


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    """nltk's own sentence tokenizer in its own files, trained on a few sentences: there is no network."""
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    text = "Mr. Brown has a dog. The dog runs to the park. Lily sees it. She is happy. Mr. Brown smiles. " * 20
    folder = tmp_path / "nltk/tokenizers/punkt_tab/english"
    folder.mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    save_punkt_params(PunktTrainer(text).get_params(), str(folder))


def test_ifeval_equals_that_of_transformers(suite, sentences, stories260k, tmp_path):
    tasks = prepare(suite, tmp_path / "tasks")
    results, _ = run_tasks(meshtune.load(stories260k), suite, tasks, console=QUIET)
    assert {name.split(",")[0] for name in results[0].metrics} >= {"prompt_level_strict_acc", "inst_level_loose_acc"}
    check_same(results, by_transformers(stories260k, suite, tasks), 1e-9)


def test_missing_data_of_nltk_are_named_with_the_way_to_get_them(suite, tmp_path, monkeypatch):
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(UserError, match="punkt_tab") as error:
        prepare(suite, tmp_path / "tasks")
    assert "NLTK_DATA" in str(error.value.fix)


@pytest.mark.parametrize("package", ["langdetect", "immutabledict", "nltk"])
def test_a_missing_package_is_named(suite, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=package) as error:
        prepare(suite, tmp_path / "tasks")
    assert ".[evaluate]" in str(error.value.fix)
