"""A stream of plain text: every token predicted once, steps that are the same from anywhere, and refusals."""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np
import pytest
from rich.console import Console

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.inspection import inspect_data
from meshtune.data.prepare import prepare_data
from meshtune.data.stream import JOURNAL_INTERVAL
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.jsonl"
    rng = np.random.default_rng(0)
    lines = [{"text": " ".join(f"word{k}" for k in rng.integers(0, 50, rng.integers(1, 60)))} for _ in range(40)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def open_stream(text, tokenizer, *overrides):
    base = text.parent / "recipe.yaml"
    base.write_text("model: x\ndata: x\noutput: x\n")
    output = text.parent / "run"
    output.mkdir(exist_ok=True)
    fields = [f"model.path={TOKENIZER}", f"data.train={text}", f"output={output}", "stage=pt", "data.streaming=true"]
    fields += ["train.steps=60", "train.batch_size=2", "data.max_length=32"]
    return prepare_data(load_recipe(str(base), [*fields, *overrides]), tokenizer, cache=text.parent / "cache")


def arrays(batches):
    return [{name: array.copy() for name, array in batch.arrays.items()} for batch in batches]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_every_token_of_an_epoch_is_predicted_once_and_rows_are_full(text, tokenizer):
    stream = open_stream(text, tokenizer, "data.shuffle=false").train
    expected_ids = []
    for line in text.read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"]
        expected_ids.append(ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id])
    expected = [pair for ids in expected_ids for pair in itertools.pairwise(ids)]
    actual = []
    for batch in stream.iterate(0, 100):
        assert (batch.arrays["segment_ids"] > 0).all()
        assert (batch.arrays["weights"] == 1).all()
        actual += list(
            zip(batch.arrays["tokens"].ravel().tolist(), batch.arrays["targets"].ravel().tolist(), strict=True)
        )
    assert len(actual) > len(expected)  # into the second epoch
    assert actual[: len(expected)] == expected


def test_pieces_of_a_document_are_segments_of_their_own(text, tokenizer):
    for batch in open_stream(text, tokenizer).train.iterate(0, 20):
        for row in batch.arrays["segment_ids"].reshape(-1, 32):
            assert (np.diff(row) >= 0).all()
            starts = np.flatnonzero(np.diff(np.concatenate([[0], row])))
            assert len(starts) == row[-1]
        positions, segments = (batch.arrays[n].reshape(-1, 32) for n in ("positions", "segment_ids"))
        inside = np.diff(segments) == 0
        assert (np.diff(positions)[inside] == 1).all()
        assert (positions[:, 0] == 0).all()


@pytest.mark.parametrize("start", [1, JOURNAL_INTERVAL, JOURNAL_INTERVAL + 5, 3 * JOURNAL_INTERVAL])
def test_a_resumed_stream_continues_at_its_position(start, text, tokenizer):
    expected_ids = arrays(open_stream(text, tokenizer).train.iterate(0, 60))
    again = open_stream(text, tokenizer).train
    assert_same(arrays(again.iterate(start, start + 2)), expected_ids[start : start + 2])
    if start == 3 * JOURNAL_INTERVAL:
        noted = [json.loads(line) for line in again.journal.read_text().splitlines()]
        assert 3 * JOURNAL_INTERVAL in [first["step"] for first in noted]
    (text.parent / "run/stream.jsonl").unlink()
    assert_same(arrays(open_stream(text, tokenizer).train.iterate(start, start + 2)), expected_ids[start : start + 2])


def test_no_flipped_bit_or_truncation_of_the_journal_changes_a_batch(text, tokenizer):
    expected = arrays(open_stream(text, tokenizer).train.iterate(40, 41))
    list(open_stream(text, tokenizer).train.iterate(0, 60))
    journal = text.parent / "run/stream.jsonl"
    pristine = journal.read_bytes()
    rng = np.random.default_rng(0)
    for index in range(30):
        data = bytearray(pristine)
        bit = int(rng.integers(8 * len(data)))
        data[bit // 8] ^= 1 << bit % 8
        journal.write_bytes(data[: bit // 8] if index % 3 == 2 else data)
        assert_same(arrays([open_stream(text, tokenizer).train.batch(40)]), expected)


def test_epochs_are_shuffled_differently(text, tokenizer):
    plain = arrays(open_stream(text, tokenizer, "data.shuffle=false").train.iterate(0, 3))
    mixed = arrays(open_stream(text, tokenizer).train.iterate(0, 3))
    assert not np.array_equal(plain[0]["tokens"], mixed[0]["tokens"])


def test_a_journal_of_other_data_is_ignored(text, tokenizer):
    expected = arrays(open_stream(text, tokenizer, "data.max_length=48").train.iterate(20, 22))
    list(open_stream(text, tokenizer).train.iterate(0, 40))
    assert_same(arrays(open_stream(text, tokenizer, "data.max_length=48").train.iterate(20, 22)), expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=null"], "give train.steps"),
        (["data.packing=false"], "fills its rows"),
    ],
)
def test_options_impossible_with_a_stream_are_refused(overrides, message, text, tokenizer):
    with pytest.raises(UserError, match=message):
        open_stream(text, tokenizer, *overrides)


def test_a_bad_record_is_named_or_left_out(text, tokenizer, monkeypatch):
    monkeypatch.setattr("meshtune.data.prepare_stream._REPORT_SAMPLE", 30)  # only these are looked at before training
    with text.open("a") as file:
        file.write('\n{"text": 7}')
    with pytest.raises(UserError) as caught:
        list(open_stream(text, tokenizer, "data.shuffle=false").train.iterate(0, 100))
    assert "record 40" in str(caught.value.where)
    assert "data.on_bad=skip" in caught.value.fix
    assert (
        len(list(open_stream(text, tokenizer, "data.shuffle=false", "data.on_bad=skip").train.iterate(0, 100))) == 100
    )


def test_a_run_that_a_bad_record_has_ended_goes_on_without_it(text, tokenizer, monkeypatch):
    monkeypatch.setattr("meshtune.data.prepare_stream._REPORT_SAMPLE", 30)
    with text.open("a") as file:
        file.write('\n{"text": 7}')
    monkeypatch.setattr("meshtune.data.stream.BLOCK", 4)
    options = ("data.shuffle=false", "data.max_length=8")
    stream, before = open_stream(text, tokenizer, *options).train, []

    def read():
        for batch in stream.iterate(0, 1000):
            before.extend(arrays([batch]))

    with pytest.raises(UserError, match="resume=true"):
        read()
    skipping = open_stream(text, tokenizer, *options, "data.on_bad=skip").train
    assert skipping.fingerprint == stream.fingerprint
    assert len(before) > 16  # the journal has an entry to go on from
    full = arrays(skipping.iterate(0, 1000))
    assert_same(full[: len(before)], before)
    assert_same(arrays(skipping.iterate(len(before), 1000)), full[len(before) :])


def test_pretraining_refuses_conversations(tmp_path, tokenizer):
    file = tmp_path / "chat.json"
    file.write_text(
        json.dumps([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    )
    with pytest.raises(UserError, match="plain text"):
        open_stream(file, tokenizer, "data.streaming=false")


@pytest.mark.parametrize("mixing", ["concat", "interleave_over"])
def test_sources_of_a_stream_are_mixed_by_weight(mixing, text, tokenizer):
    second = text.parent / "other.jsonl"
    second.write_text("\n".join(json.dumps({"text": f"other {index}"}) for index in range(40)))
    sources = json.dumps([{"path": str(text), "weight": 3}, {"path": str(second), "weight": 1}])
    overrides = [f"data.train={sources}", f"data.mixing={mixing}"]
    stream = open_stream(text, tokenizer, *overrides).train
    share = np.mean(stream.documents.source == 0)
    assert share == 0.75 if mixing == "concat" else 0.6 < share < 0.9
    expected = arrays(stream.iterate(0, 40))
    assert_same(arrays(open_stream(text, tokenizer, *overrides).train.iterate(30, 32)), expected[30:32])
    (text.parent / "run/stream.jsonl").unlink()
    assert_same(arrays(open_stream(text, tokenizer, *overrides).train.iterate(30, 32)), expected[30:32])
    assert stream.fingerprint != open_stream(text, tokenizer).train.fingerprint


def test_a_stream_belongs_to_the_contents_of_its_files(text, tokenizer):
    """Not to their names and numbers of records alone: a file replaced by one of equal length is another stream."""
    before = open_stream(text, tokenizer).train.fingerprint
    assert open_stream(text, tokenizer).train.fingerprint == before
    records = [json.loads(line) for line in text.read_text().splitlines()]
    text.write_text("\n".join(json.dumps({"text": record["text"][::-1]}) for record in records))
    assert open_stream(text, tokenizer).train.fingerprint != before


def test_records_held_out_of_a_stream_are_those_of_a_loader_and_never_trained_on(text, tokenizer):
    lines = text.read_text().splitlines()
    prepared = open_stream(text, tokenizer, "data.validation=0.2")
    loaded = open_stream(text, tokenizer, "data.validation=0.2", "data.streaming=false")
    assert prepared.validation is not None
    assert loaded.validation is not None
    held_out = {str(prepared.validation.store.origin(index)) for index in range(len(prepared.validation.store))}
    assert held_out == {str(loaded.validation.store.origin(index)) for index in range(len(loaded.validation.store))}
    assert len(held_out) == len(lines) // 5
    rows = (row for batch in prepared.train.iterate(0, 200) for rows in batch.origins for row in rows)
    trained = {str(origin) for row in rows for origin in row}
    assert len(trained) == len(lines) - len(held_out)
    assert not trained & held_out
    assert prepared.fingerprint != open_stream(text, tokenizer).fingerprint


def test_a_bad_record_that_is_held_out_is_named_or_left_out(text, tokenizer):
    text.write_text(text.read_text() + "".join('\n{"text": 7}' for _ in range(40)))
    held_out = "data.validation=0.5"
    with pytest.raises(UserError, match=r"data\.on_bad=skip") as caught:
        open_stream(text, tokenizer, held_out, "data.on_bad=error")
    assert "text.jsonl" in str(caught.value.where)
    prepared = open_stream(text, tokenizer, held_out, "data.on_bad=skip")
    assert prepared.validation is not None
    assert 0 < len(prepared.validation.store) < 40
    assert len(prepared.validation.store) + len(prepared.report.skipped) == 40


def test_a_stream_is_inspected(text, tokenizer, capsys):
    recipe = load_recipe(
        {"model": str(TOKENIZER), "stage": "pt", "output": str(text.parent / "run"), "train": {"steps": 4}},
        [f"data.train={text}", "data.streaming=true", "data.shuffle=false", "data.max_length=32"],
    )
    inspect_data(recipe, records=2, console=Console(width=200))
    shown = capsys.readouterr().out
    first = json.loads(text.read_text().splitlines()[0])["text"].split()[0]
    assert first in shown.replace("·", "")
    assert "record 1" in shown
    assert "record 2" not in shown
    assert "packing efficiency" in shown
