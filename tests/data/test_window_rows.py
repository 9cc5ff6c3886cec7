"""A stream of conversations, pairs and labelled answers: the samples of a loader, from anywhere, in every process."""

from __future__ import annotations

import collections
import json
import pathlib
import random

import numpy as np
import pytest

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.stream import JOURNAL_INTERVAL, UNIT_POSITIONS
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
WINDOW = 48
SAMPLES = 2 * WINDOW + 20  # an epoch is three windows
VOCABULARY = ["Tom", "Lily", "the dog", "a tree", "went", "was happy", "saw a cake"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER, "plain")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr("meshtune.data.stream.WINDOW", WINDOW)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of records for each type of data, of different lengths."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def phrase(limit):
        return " ".join(rng.choice(VOCABULARY) for _ in range(rng.randint(1, limit)))

    def record(kind, number):
        prompt = f"{number} {phrase(6)}"
        match kind:
            case "sft":
                return {"instruction": prompt, "output": f"answer {number} {phrase(12)}"}
            case "kto":
                return {"prompt": prompt, "completion": f"answer {number} {phrase(8)}", "label": number % 3 == 0}
            case _:
                return {"prompt": prompt, "chosen": f"good {number} {phrase(8)}", "rejected": f"bad {phrase(12)}"}

    for kind in ("sft", "kto", "dpo"):
        lines = [json.dumps(record(kind, number)) for number in range(SAMPLES)]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def prepare_stage(files, tokenizer):
    """prepare_stage(stage, *overrides): the training data of a recipe, whose run is in a folder of that name."""

    def prepare(stage, *overrides, streaming=True, run="run"):
        base = files / "recipe.yaml"
        base.write_text("model: x\ndata: x\noutput: x\n")
        output = files / run
        output.mkdir(exist_ok=True)
        name = stage if stage in ("sft", "kto") else "dpo"
        steps = ["data.streaming=true", "train.steps=60"] if streaming else ["train.epochs=1"]
        fields = [f"model.path={TOKENIZER}", f"data.train={files / name}.jsonl", f"output={output}", f"stage={stage}"]
        fields += ["train.batch_size=4", "data.max_length=160", "seed=3", *steps]
        return prepare_data(load_recipe(str(base), [*fields, *overrides]), tokenizer, cache=files / "cache")

    yield prepare
    for journal in files.glob("*/stream.jsonl"):
        journal.unlink()


def arrays(batches):
    return [{name: array.copy() for name, array in batch.arrays.items()} for batch in batches]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)


def segments(batches, size=1):
    """How often each unit of `size` neighbouring segments occurs, with its tokens, targets, weights and value."""
    units = collections.Counter()
    for batch in batches:
        tokens = {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}
        for row, ids in enumerate(tokens["segment_ids"]):
            for unit in range(int(ids.max()) // size):
                within = (ids > size * unit) & (ids <= size * (unit + 1))
                names = ("tokens", "targets", "weights", "positions")
                content = tuple(tokens[name][row][within].tobytes() for name in names)
                units[*content, float(tokens["values"][row, unit]) if "values" in tokens else 0.0] += 1
    return units


def epoch(stream, number):
    """The rows of an epoch, each as a batch."""
    before = sum(len(stream.rows.window(e, w).rows) for e in range(number) for w in range(stream.rows.windows))
    count = sum(len(stream.rows.window(number, window).rows) for window in range(stream.rows.windows))
    return arrays(stream.iterate(before, before + count))


@pytest.mark.parametrize(
    ("stage", "packing"), [("sft", "true"), ("sft", "false"), ("dpo", "true"), ("dpo", "false"), ("rm", "true")]
)
def test_every_epoch_of_a_stream_has_the_samples_of_the_loader(stage, packing, prepare_stage):
    size = 1 if stage == "sft" else 2
    overrides = (f"data.packing={packing}", "train.batch_size=1")
    loader = prepare_stage(stage, *overrides, streaming=False).train
    expected = segments(arrays(loader.iterate(0, loader.steps_per_epoch(0))), size)
    assert sum(expected.values()) == SAMPLES
    stream = prepare_stage(stage, *overrides).train
    first, second = epoch(stream, 0), epoch(stream, 1)
    assert segments(first, size) == segments(second, size) == expected
    assert not np.array_equal(first[0]["tokens"], second[0]["tokens"])
    if packing == "true":
        assert len(first) < 1.2 * loader.steps_per_epoch(0)


def test_labelled_answers_are_those_of_the_loader_and_companions_have_answers_of_their_window(prepare_stage):
    def answers(batches):
        """(prompt, answer, label) of every answer, and (prompt, answer) of its companion."""
        for batch in batches:
            ids = batch["segment_ids"][0, 0]
            for unit in range(int(batch["units"].sum())):
                sides = []
                for segment in (2 * unit + 1, 2 * unit + 2):
                    tokens, weights = (batch[name][0, 0][ids == segment] for name in ("targets", "weights"))
                    sides.append((tokens[weights == 0].tobytes(), tokens[weights > 0].tobytes()))
                yield *sides, float(batch["values"][0, 0, unit])

    loader = prepare_stage("kto", "train.batch_size=1", streaming=False).train
    expected = [(first, label) for first, _, label in answers(arrays(loader.iterate(0, loader.steps_per_epoch(0))))]
    stream = prepare_stage("kto", "train.batch_size=1").train
    streamed = list(answers(epoch(stream, 0)))
    assert collections.Counter((first, label) for first, _, label in streamed) == collections.Counter(expected)
    for start in range(0, SAMPLES, WINDOW):
        stop = start + WINDOW
        window = streamed[start:stop]
        of_others = collections.Counter(answer for (_, answer), _, _ in window)
        assert collections.Counter(answer for _, (_, answer), _ in window) == of_others
        for (prompt, answer), companion, _ in window:
            assert companion[0] == prompt
            assert companion[1] != answer


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "orpo"])
def test_a_stream_continues_bit_for_bit_at_any_update(stage, prepare_stage):
    expected = arrays(prepare_stage(stage).train.iterate(0, 60))
    for start in (1, JOURNAL_INTERVAL, 2 * JOURNAL_INTERVAL + 5, 55):
        assert_same(arrays(prepare_stage(stage).train.iterate(start, start + 3)), expected[start : start + 3])
        without_journal = prepare_stage(stage, run="other").train
        assert_same(arrays(without_journal.iterate(start, start + 3)), expected[start : start + 3])


def test_a_resumed_stream_reads_only_the_window_that_it_stopped_in(prepare_stage, files):
    list(prepare_stage("sft", "train.batch_size=16").train.iterate(0, 60))
    entries = [json.loads(line) for line in (files / "run/stream.jsonl").read_text().splitlines()]
    last = max(entries, key=lambda entry: entry["step"])
    assert last["spot"][0] > 0, "the last entry was to be in a later epoch"
    stream = prepare_stage("sft", "train.batch_size=16").train
    read, window = [], stream.rows.window
    stream.rows.window = lambda *place: (read.append(place), window(*place))[1]
    stream.batch(last["step"])
    assert set(read) <= {tuple(last["spot"][:2]), (last["spot"][0], last["spot"][1] + 1), (last["spot"][0] + 1, 0)}


def test_all_processes_of_a_job_compute_the_same_global_batches(prepare_stage):
    """Each process places its rows of the same global batch, whatever it read before."""
    full = arrays(prepare_stage("dpo", "train.batch_size=8", "train.micro_batch=4").train.iterate(0, 24))
    processes = [
        prepare_stage("dpo", "train.batch_size=8", "train.micro_batch=4", run=f"process{n}").train for n in (0, 1)
    ]
    shares = [arrays(processes[0].iterate(0, 24))[20:], arrays(processes[1].iterate(20, 24))]
    for expected, first, second in zip(full[20:], *shares, strict=True):
        for name, array in expected.items():
            assert np.array_equal(np.concatenate([first[name][:, :2], second[name][:, 2:]], axis=1), array)
    assert processes[0].fingerprint == processes[1].fingerprint


@pytest.mark.parametrize("mixing", ["concat", "interleave_over"])
def test_weights_of_sources_are_their_shares_of_the_samples(mixing, prepare_stage, files):
    second = files / "other.jsonl"
    second.write_text("\n".join(json.dumps({"instruction": f"q {n}", "output": f"other {n}"}) for n in range(300)))
    sources = json.dumps([{"path": str(files / "sft.jsonl"), "weight": 3}, {"path": str(second), "weight": 1}])
    stream = prepare_stage("sft", f"data.train={sources}", f"data.mixing={mixing}").train
    batches = list(stream.iterate(0, 20))
    origins = [origin.source for batch in batches for micro in batch.origins for row in micro for origin in row]
    assert 0.2 < np.mean([pathlib.Path(name).name == "other.jsonl" for name in origins]) < 0.3
    assert stream.fingerprint != prepare_stage("sft").train.fingerprint


def test_arrays_of_units_keep_their_shapes_and_weights_add_up(prepare_stage):
    stream = prepare_stage("orpo").train
    shapes = {tuple(array.shape for array in batch.values()) for batch in arrays(stream.iterate(0, 30))}
    assert len(shapes) == 1
    for batch in arrays(stream.iterate(0, 30)):
        assert batch["units"].shape == (1, 4, 2 * 160 // UNIT_POSITIONS)
        assert (batch["segment_ids"].max(-1) == 2 * batch["units"].sum(-1)).all()
        np.testing.assert_allclose(batch["nll"].sum(), batch["units"].sum(), rtol=1e-5)


def test_the_report_estimates_from_the_first_window(prepare_stage):
    report = prepare_stage("dpo").report
    exact = prepare_stage("dpo", streaming=False).report
    assert report.samples == exact.samples == SAMPLES
    assert report.samples_left_out == 0
    assert report.efficiency == pytest.approx(exact.efficiency, abs=0.1)
    assert report.counts.tokens == pytest.approx(60 * 4 * 320 * exact.efficiency, rel=0.15)
    assert f"{WINDOW:,}" in report.notes[0]


def test_validation_of_a_stream_is_that_of_any_run(prepare_stage, files):
    overrides = [f"data.validation={files / 'dpo.jsonl'}"]
    streamed, unstreamed = prepare_stage("dpo", *overrides), prepare_stage("dpo", *overrides, streaming=False)
    assert_same(arrays(streamed.validation.iterate(0, 3)), arrays(unstreamed.validation.iterate(0, 3)))
    assert streamed.validation_report.split == "validation"


def test_a_stream_without_a_number_of_updates_is_refused(prepare_stage):
    with pytest.raises(UserError, match=r"give train\.steps") as caught:
        prepare_stage("sft", "train.steps=null")
    assert caught.value.where == "train.steps"


def test_records_that_cannot_be_read_are_named_or_left_out(prepare_stage, files):
    broken = files / "broken.jsonl"
    broken.write_text((files / "sft.jsonl").read_text() + '\n{"instruction": 7}')
    overrides = [f"data.train={broken}", "data.shuffle=false", "train.batch_size=16"]
    with pytest.raises(UserError) as caught:
        list(prepare_stage("sft", *overrides).train.iterate(0, 60))
    assert f"record {SAMPLES}" in str(caught.value)
    stream = prepare_stage("sft", *overrides, "data.on_bad=skip").train
    assert len(list(stream.iterate(0, 60))) == 60


def test_answers_with_a_single_label_are_refused(prepare_stage, files):
    good = files / "good.jsonl"
    good.write_text("\n".join(json.dumps({"prompt": "a", "completion": f"b {n}", "label": True}) for n in range(20)))
    with pytest.raises(UserError, match="all 20 answers are labelled true"):
        prepare_stage("kto", f"data.train={good}")


def test_data_with_nothing_to_train_on_are_refused(prepare_stage, files):
    with pytest.raises(UserError, match="nothing to train on"):
        prepare_stage("sft", "data.max_length=4")


def test_the_first_examples_of_a_stream_are_those_of_its_first_window(prepare_stage):
    rows = prepare_stage("dpo").train.rows
    first = rows.window(0, 0).examples
    assert all(a is b for a, b in zip(rows.first_examples(3), first[:3], strict=True))
    assert len(rows.first_examples(10_000)) == len(first)
