"""From recipes to loaders: real records, the cache, the system prompt, and data with nothing in them."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from typer.testing import CliRunner

from meshtune.cli.data import app
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.store import MANIFEST
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError


@pytest.fixture(scope="module")
def smol(shared):
    return load_tokenizer(shared / "assets/tokenizers/smollm2")


@pytest.fixture(scope="module")
def alpaca(shared):
    return str(shared / "assets/data/llamafactory/alpaca_en_demo.json")


def recipe(train, **data):
    return Recipe.model_validate({"model": "none", "output": "out", "data": {"train": train, **data}, "seed": 3})


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def pair(question="2+2?", answer="four"):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_real_records_fill_their_rows(smol, alpaca, tmp_path):
    """At least 97% of the positions of alpaca_en_demo at T = 1024 hold tokens."""
    prepared = prepare_data(recipe(alpaca), smol, vocab=49152, cache=tmp_path)
    assert prepared.report.efficiency >= 0.97
    assert prepared.report.counts.documents == prepared.report.counts.examples == 999
    assert prepared.report.warnings == []
    answers = [record["output"] for record in json.loads(pathlib.Path(alpaca).read_text())]
    for index in (0, 500, 998):
        example = prepared.train.store[index]
        learned = smol.decode(example.ids[example.weights > 0].tolist())
        assert learned == answers[example.origin.record] + "<|im_end|>"


def test_tokens_are_cached(smol, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair(answer=f"answer {index}") for index in range(5)])
    first = prepare_data(recipe(file), smol, cache=tmp_path)
    again = prepare_data(recipe(file), smol, cache=tmp_path)
    assert again.train.store.path == first.train.store.path
    assert again.report == first.report
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "change", [{"max_length": 9}, {"train_on_prompt": True}, {"system": "Be brief."}, {"overlong": "drop"}]
)
def test_tokens_are_rebuilt_when_an_option_changes(smol, tmp_path, change):
    file = write(tmp_path / "a.jsonl", [pair(answer=f"answer {index}") for index in range(5)])
    first = prepare_data(recipe(file), smol, cache=tmp_path)
    try:
        assert prepare_data(recipe(file, **change), smol, cache=tmp_path).fingerprint != first.fingerprint
    except UserError as error:
        assert "nothing to train on" in str(error)  # noqa: PT017 - all are longer than nine tokens


def test_each_template_has_its_own_cache(shared, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair()])
    folder = shared / "assets/models/stories260K"
    prints = {
        prepare_data(recipe(file), load_tokenizer(folder, name), cache=tmp_path).fingerprint
        for name in ("plain", "alpaca")
    }
    assert len(prints) == 2


def test_changed_records_are_read_again(smol, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair(answer="four")])
    prepare_data(recipe(file), smol, cache=tmp_path)
    write(tmp_path / "a.jsonl", [pair(answer="five")])
    example = prepare_data(recipe(file), smol, cache=tmp_path).train.store[0]
    assert smol.decode(example.ids[example.weights > 0].tolist()) == "five<|im_end|>"


def test_validation_keeps_its_order_and_has_micro_batches(smol, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair(answer=f"answer {index}") for index in range(40)])
    updated = Recipe.model_validate(
        {
            "model": "none",
            "output": "out",
            "data": {"train": file, "validation": 8},
            "train": {"batch_size": 8, "micro_batch": 2},
        }
    )
    prepared = prepare_data(updated, smol, cache=tmp_path)
    assert prepared.validation is not None
    assert prepared.train.batch(0).arrays["tokens"].shape == (4, 2, 1024)
    assert prepared.validation.batch(0).arrays["tokens"].shape == (1, 2, 1024)
    records = [origin.record for row in prepared.validation.batch(0).origins[0] for origin in row]
    assert len(records) == len(set(records)) == 8
    train = [prepared.train.store.origin(index).record for index in range(len(prepared.train.store))]
    assert not set(train) & set(records)
    order = [prepared.validation.rows(epoch).documents.tolist() for epoch in (0, 1)]
    assert order[0] == order[1]


def test_a_system_prompt_goes_before_conversations_that_have_none(smol, tmp_path):
    with_system = {"messages": [{"role": "system", "content": "Mine."}, *pair()["messages"]]}
    prepared = prepare_data(
        recipe(write(tmp_path / "a.jsonl", [pair(), with_system]), system="Yours."), smol, cache=tmp_path
    )
    texts = [smol.decode(prepared.train.store[index].ids.tolist()) for index in range(2)]
    assert ["Yours." in text for text in texts] == [True, False]
    assert ["Mine." in text for text in texts] == [False, True]


def test_data_without_anything_to_train_on_are_an_error_with_reasons(smol, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair("word " * 50) for _ in range(3)])
    with pytest.raises(
        UserError, match=r"contain nothing to train on[\s\S]*3 have nothing to train on after truncation"
    ):
        prepare_data(recipe(file, max_length=40), smol, cache=tmp_path)


def test_a_vocabulary_larger_than_the_embedding_is_an_error_before_anything_is_read(smol, tmp_path):
    with pytest.raises(UserError, match="embedding has 1000 entries"):
        prepare_data(recipe("not there"), smol, vocab=1000, cache=tmp_path)


def test_the_report_lists_skipped_records_of_formats_and_templates(shared, tmp_path):
    gemma = shared / "assets/tokenizers/chat_templates/google-gemma-2-2b-it.jinja"
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2", str(gemma))
    refused = {"messages": [{"role": "system", "content": "s"}, *pair()["messages"]]}
    empty = pair(answer="")
    file = write(tmp_path / "a.jsonl", [pair(), refused, empty, pair()])
    prepared = prepare_data(recipe(file, on_bad="skip"), tokenizer, cache=tmp_path)
    assert [item.origin.rsplit(" ", 1)[1] for item in prepared.report.skipped] == ["2", "1"]
    assert prepared.report.counts.examples == 2


def test_progress_is_reported(smol, tmp_path):
    reports = []
    file = write(tmp_path / "a.jsonl", [pair(answer=f"answer {index}") for index in range(300)])
    prepare_data(recipe(file), smol, cache=tmp_path, progress=lambda *item: reports.append(item))
    assert (f"reading {file}", 0, 300) in reports
    assert reports[-1] == ("tokenising train data", 300, 300)


def test_a_record_that_changed_is_tokenised_again(smol, tmp_path):
    file = write(tmp_path / "a.jsonl", [pair(answer=f"answer {index}") for index in range(5)])
    first = prepare_data(recipe(file), smol, cache=tmp_path)
    write(tmp_path / "a.jsonl", [pair(answer=f"answer {index + (index == 3)}") for index in range(5)])
    changed = prepare_data(recipe(file), smol, cache=tmp_path)
    assert changed.fingerprint != first.fingerprint
    assert "answer 4" in smol.decode(changed.train.store[3].ids.tolist())


@pytest.mark.parametrize("while_it_is", ["reading", "tokenising"])
def test_a_file_that_is_written_to_meanwhile_leaves_nothing_behind(smol, tmp_path, monkeypatch, while_it_is):
    monkeypatch.setattr("meshtune.data.store.SHARD", 32)
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "1")
    file = write(tmp_path / "a.jsonl", [pair(answer=f"answer {index}") for index in range(320)])

    def progress(activity, done, of):
        if activity.startswith(while_it_is):
            with open(file, "a") as appended:
                appended.write(json.dumps(pair()) + "\n")

    with pytest.raises(UserError, match="the file was changed while it was read") as caught:
        prepare_data(recipe(file), smol, cache=tmp_path / "cache", progress=progress)
    assert caught.value.where == file
    assert not list((tmp_path / "cache").rglob("shard-*"))
    assert not list((tmp_path / "cache").rglob(MANIFEST))


def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was(smol, tmp_path):
    answers = [pair(answer=f"answer {index}") for index in range(5)]
    file = write(tmp_path / "a.jsonl", answers)
    first = prepare_data(recipe(file), smol, cache=tmp_path / "first")

    def progress(activity, done, of):
        pathlib.Path(write(tmp_path / "new", [pair()])).replace(file)

    assert prepare_data(recipe(file), smol, cache=tmp_path, progress=progress).fingerprint == first.fingerprint
    assert len(prepare_data(recipe(file), smol, cache=tmp_path).train.store) == 1


def test_inspect_shows_what_is_trained_on(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    file = write(tmp_path / "a.jsonl", [pair(answer="four apples")])
    model = shared / "assets/models/stories260K"
    arguments = ["inspect", f"model={model}", f"data={file}", "output=out", "model.chat_template=plain"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    shown = result.output.replace("·", "").replace("\n", "")
    assert "⟦four apples</s>⟧" in shown
    assert "packing efficiency" in shown
    assert "padding" in shown  # one document in a row of 1024 is warned of


def test_inspect_checks_the_vocabulary_of_the_model(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    file = write(tmp_path / "a.jsonl", [pair()])
    tokenizer = shared / "assets/tokenizers/smollm2"
    arguments = ["inspect", f"model.path={tmp_path}", f"model.tokenizer={tokenizer}", f"data={file}", "output=out"]
    with pytest.raises(UserError, match="embedding has 100 entries"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_first_batch_has_the_contents_of_its_records(smol, alpaca, tmp_path):
    """The whole way, against plain transformers: every segment is a record's own `apply_chat_template`, shifted."""
    prepared = prepare_data(recipe(alpaca), smol, cache=tmp_path)
    batch, records = prepared.train.batch(0), json.loads(pathlib.Path(alpaca).read_text())
    row = {name: array[0, 0] for name, array in batch.arrays.items()}
    for segment, origin in enumerate(batch.origins[0][0], start=1):
        record = records[origin.record]
        question = record["instruction"] + (f"\n{record['input']}" if record["input"] else "")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
        ids = smol.apply_chat_template(messages, return_dict=False)
        span = row["segment_ids"] == segment
        assert row["tokens"][span].tolist() == ids[:-1]
        assert row["targets"][span].tolist() == ids[1:]
        assert np.array_equal(row["positions"][span], np.arange(len(ids) - 1))
