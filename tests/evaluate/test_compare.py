"""Before and after on a small run: same base, same prompts; what the report says."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("lm_eval", reason="the extra evaluate is not installed")

import published

import meshtune
from meshtune.errors import UserError
from meshtune.evaluate.compare import Outcome, read_results
from meshtune.evaluate.predict import Predictions, PredictOptions
from meshtune.evaluate.run import Subject, default_output, evaluate_model, identity, make_evaluation, run_data, variants
from meshtune.quickstart import MODEL
from meshtune.terminal import console
from meshtune.weights.inspect import base_hash

QUIET = console(quiet=True)
LOADING = {"revision": None, "chat_template": None, "dtype": None, "quantize": "auto"}
OPTIONS = PredictOptions(metrics=("exact_match", "f1"), max_tokens=6)


@pytest.fixture(scope="module")
def run(stories260k, tmp_path_factory):
    """A LoRA run that learns one sentence, with a file and two of its records held out."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"prompt": f"The {animal} said", "completion": " hello to Lily."} for animal in published.ANIMALS]
    published.write_lines(folder / "train.jsonl", rows)
    recipe = {
        "model": {"path": str(stories260k)},
        "data": {"train": str(folder / "train.jsonl"), "validation": 2, "max_length": 32},
        "output": str(folder / "out"),
        "train": {"steps": 15, "batch_size": 4},
        "optimizer": {"learning_rate": 0.01},
        "eval": {"every": None},
        "evaluate": {
            "tasks": {"perplexity": str(published.perplexity(folder))},
            "new_tokens": 6,
            "metrics": ["exact_match", "f1"],
        },
    }
    meshtune.train(recipe)
    return folder / "out"


@pytest.fixture(scope="module")
def outcome(run):
    """The evaluation that the run ended with: its folder, and its results again."""
    folder = run / "evaluation/base"
    sides = {}
    for name in ("base", "tuned"):
        rows = [json.loads(line) for line in (folder / name / "predictions.jsonl").read_text().splitlines()]
        totals = json.loads((folder / name / "metrics.json").read_text())
        sides[name] = Outcome(Predictions(rows, totals), read_results(folder / name) or [])
    return folder, sides


def test_held_out_records_are_those_of_the_run(run):
    records, trained_on = run_data(str(run))
    assert (len(records), len(trained_on)) == (2, 8)
    assert not {record.prompt for record in records} & {document.prompt for document in trained_on}


def test_a_stream_holds_out_the_same_records(tmp_path):
    rows = [{"prompt": f"The {animal} said", "completion": " hello."} for animal in published.ANIMALS]
    published.write_lines(tmp_path / "train.jsonl", rows)
    recipe = f"model: models/any\noutput: {tmp_path}\ndata: {{train: {tmp_path}/train.jsonl, validation: 2, streaming: "
    (tmp_path / "recipe.yaml").write_text(recipe + "true}\ntrain: {steps: 2}\n")
    streamed, none = run_data(str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(recipe + "false}\ntrain: {steps: 2}\n")
    full, trained_on = run_data(str(tmp_path))
    assert list(streamed) == list(full)
    assert (len(streamed), len(none), len(trained_on)) == (2, 0, len(rows) - 2)


def test_the_tuned_side_gains_on_its_records_and_the_base_is_the_base(outcome, run, stories260k):
    _, outcomes = outcome
    assert list(outcomes) == ["base", "tuned"]
    before, after = (outcomes[name].predictions.totals["loss"] for name in ("base", "tuned"))
    assert after < 0.5 * before
    base = meshtune.load(stories260k)
    rows = outcomes["base"].predictions.rows
    assert [row["answer"] for row in rows] == base.generate([row["prompt"] for row in rows], max_tokens=6)
    tuned = meshtune.load(run)
    rows = outcomes["tuned"].predictions.rows
    assert [row["answer"] for row in rows] == tuned.generate([row["prompt"] for row in rows], max_tokens=6)


def test_the_report_says_what_was_gained_and_lost(outcome):
    folder, outcomes = outcome
    text = (folder / "report.md").read_text()
    page = (folder / "report.html").read_text()
    metrics = {name: outcomes[name].tasks[0].metrics["word_perplexity,none"] for name in outcomes}
    assert metrics["tuned"] > metrics["base"]  # a sentence learned by heart costs what was known before
    assert "Gained" not in text  # of two records and three texts nothing follows
    assert "Too few to say: no metric has more than 3 samples" in text
    assert f"{metrics['base']:.4g}" in text
    assert "hello to Lily." in text
    assert page.count("data:image/png;base64,") == 2
    assert "Intervals" not in text
    assert "http" not in page.replace("http-equiv", "")
    samples = [json.loads(line) for line in (folder / "tuned/samples/perplexity.jsonl").read_text().splitlines()]
    assert len(samples) == 3


@pytest.mark.slow
def test_a_run_of_full_weights_is_compared_with_the_model_it_started_from(stories260k, tmp_path):
    """By the recipe in the run; the base's answers and loss are those of the model itself."""
    rows = [{"prompt": f"The {animal} said", "completion": " hello to Lily."} for animal in published.ANIMALS]
    published.write_lines(tmp_path / "train.jsonl", rows)
    run = tmp_path / "out"
    meshtune.train(
        {
            "model": {"path": str(stories260k)},
            "method": {"kind": "full"},
            "data": {"train": str(tmp_path / "train.jsonl"), "validation": 2, "max_length": 32},
            "output": str(run),
            "train": {"steps": 6, "batch_size": 4},
            "optimizer": {"learning_rate": 0.005},
            "eval": {"every": None},
        }
    )
    records, trained_on = run_data(str(run))
    evaluation = make_evaluation(records, (), {}, predicting=OPTIONS)
    subject = Subject(str(run), None, "base", LOADING)
    outcomes = evaluate_model(subject, evaluation, tmp_path / "report", console=QUIET, trained_on=trained_on)
    base, tuned = (outcomes[name].predictions for name in ("base", "tuned"))
    prompts = [row["prompt"] for row in base.rows]
    assert [row["answer"] for row in base.rows] == meshtune.load(stories260k).generate(prompts, max_tokens=6)
    assert [row["answer"] for row in tuned.rows] == meshtune.load(run).generate(prompts, max_tokens=6)
    assert tuned.totals["loss"] < 0.8 * base.totals["loss"]
    with pytest.raises(UserError, match="does not say what it was made from"):
        variants(Subject(str(run / "model"), None, "base", LOADING))


def test_results_that_are_there_are_not_computed_again(outcome, run, tmp_path):
    folder, first = outcome
    records, _ = run_data(str(run))
    evaluation = make_evaluation(
        records, ("perplexity",), {"perplexity": run.parent / "stories.jsonl"}, predicting=OPTIONS
    )
    subject = Subject(str(run), None, "base", LOADING)
    with pytest.raises(UserError, match="the folder is not empty"):
        evaluate_model(subject, evaluation, folder, console=QUIET)
    file = folder / "tuned/predictions.jsonl"
    file.write_text(file.read_text().replace('"answer": "', '"answer": "(from before) ', 1))
    again = evaluate_model(subject, evaluation, folder, console=QUIET, resume=True)
    assert again["tuned"].predictions.rows[0]["answer"].startswith("(from before)")
    assert again["tuned"].tasks[0].metrics == first["tuned"].tasks[0].metrics


def test_what_would_stop_the_evaluation_stops_the_run_before_it_begins(stories260k, tmp_path):
    published.write_lines(tmp_path / "train.jsonl", [{"text": "Once upon a time there was a dog."}] * 4)
    recipe = {
        "model": {"path": str(stories260k)},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "output": str(tmp_path / "out"),
        "evaluate": {"tasks": {"mmlu": str(tmp_path / "nowhere")}},
    }
    with pytest.raises(UserError, match="mmlu needs a folder with test or val"):
        meshtune.train(recipe)
    with pytest.raises(UserError, match="there is nothing to evaluate"):
        meshtune.train(recipe | {"evaluate": {}})
    assert not (tmp_path / "out").exists()


def test_an_evaluation_set_that_is_the_training_set_is_refused(run, tmp_path):
    from meshtune.cli.evaluate import source_section
    from meshtune.evaluate.predict import read_records

    _, trained_on = run_data(str(run))
    shutil.copy(run.parent / "train.jsonl", tmp_path / "again.jsonl")
    records = read_records(source_section(str(tmp_path / "again.jsonl"), columns=None))
    prompts = {document.prompt for document in trained_on}
    records = [record for record in records if record.prompt in prompts]
    evaluation = make_evaluation(records, (), {}, predicting=OPTIONS)
    subject = Subject(str(run), None, None, LOADING)
    with pytest.raises(UserError, match=r"the evaluation data are training data: all 8 records[\s\S]*again.jsonl"):
        evaluate_model(subject, evaluation, tmp_path / "out", console=QUIET, trained_on=trained_on)
    assert not (tmp_path / "out").exists()
    allowed = {"trained_on": trained_on, "allow_training_data": True}
    evaluate_model(subject, evaluation, tmp_path / "out", console=QUIET, **allowed)
    assert "THE EVALUATION DATA ARE TRAINING DATA" in (tmp_path / "out/report.md").read_text().splitlines()[2]


def test_nothing_to_evaluate_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="there is nothing to evaluate"):
        evaluate_model(Subject(str(run), None, None, LOADING), make_evaluation([], (), {}), tmp_path, console=QUIET)


def test_results_of_a_run_go_into_the_run(run):
    assert default_output(str(run), "evaluation", "base") == run / "evaluation/base"


def test_results_belong_to_every_byte_of_the_weights(tmp_path):
    """Also to those that the hash of a base leaves out, since it samples large tensors."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    before, hashed = identity(str(copy)), base_hash(copy)
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    for place in range(len(content) - 1, 0, -997):
        content[place] ^= 1
        file.write_bytes(content)
        if base_hash(copy) == hashed:
            break
        content[place] ^= 1
    assert base_hash(copy) == hashed
    assert identity(str(copy)) != before
