"""A stream of conversations, pairs and labelled answers: the samples of a loader, from anywhere, by shares of rows."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import signal
import threading

import numpy as np
import pytest

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.stream import JOURNAL_INTERVAL, UNIT_POSITIONS, BlockReader, LanePosition
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
SAMPLES = 116
LANES = 4  # rows of an update
VOCABULARY = ["Tom", "Lily", "the dog", "a tree", "went", "was happy", "saw a cake"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER, "plain")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("meshtune.data.stream.LANE_SAMPLES", 16)
    monkeypatch.setattr("meshtune.data.stream.BLOCK", 8)
    monkeypatch.setattr("meshtune.data.stream.PACKED_ROWS", 3)


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
            case "pt":
                return {"text": f"{prompt} {phrase(30)}"}
            case "kto":
                return {"prompt": prompt, "completion": f"answer {number} {phrase(8)}", "label": number % 3 == 0}
            case _:
                return {"prompt": prompt, "chosen": f"good {number} {phrase(8)}", "rejected": f"bad {phrase(12)}"}

    for kind in ("sft", "kto", "dpo", "pt"):
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
        name = stage if stage in ("sft", "kto", "pt") else "dpo"
        steps = ["data.streaming=true", "train.steps=60"] if streaming else ["train.epochs=1"]
        fields = [f"model.path={TOKENIZER}", f"data.train={files / name}.jsonl", f"output={output}", f"stage={stage}"]
        fields += [f"train.batch_size={LANES}", "data.max_length=160", "seed=3", *steps]
        return prepare_data(load_recipe(str(base), [*fields, *overrides]), tokenizer, cache=files / "cache")

    yield prepare
    for journal in files.glob("*/stream*.jsonl"):
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


def epochs(stream):
    """The rows of the first two epochs of a stream of one row, each as a batch."""
    assert stream.rows.lanes == stream.batch_size == 1
    reader = BlockReader(stream.rows, 1, 1)
    lane = stream.rows.lane(0, reader, LanePosition())
    rows = collections.defaultdict(list)
    while lane.position.epoch < 2:
        row = lane.row()
        rows[lane.position.epoch].append(stream.rows.batch([row], 0, 0))
    return arrays(rows[0]), arrays(rows[1])


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
    first, second = epochs(stream)
    assert segments(first, size) == segments(second, size) == expected
    assert not np.array_equal(first[0]["tokens"], second[0]["tokens"])
    if packing == "true":
        assert len(first) < 1.2 * loader.steps_per_epoch(0)


def test_labelled_answers_are_those_of_the_loader_and_companions_have_answers_of_others(prepare_stage):
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
    streamed = list(answers(epochs(stream)[0]))
    assert collections.Counter((first, label) for first, _, label in streamed) == collections.Counter(expected)
    of_others = collections.Counter(answer for (_, answer), _, _ in streamed)
    assert collections.Counter(answer for _, (_, answer), _ in streamed) == of_others
    for (prompt, answer), companion, _ in streamed:
        assert companion[0] == prompt
        assert companion[1] != answer


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "orpo"])
def test_a_stream_continues_bit_for_bit_at_any_update(stage, prepare_stage):
    expected = arrays(prepare_stage(stage).train.iterate(0, 60))
    for start in (1, JOURNAL_INTERVAL, 2 * JOURNAL_INTERVAL + 5, 55):
        assert_same(arrays(prepare_stage(stage).train.iterate(start, start + 3)), expected[start : start + 3])
        without_journal = prepare_stage(stage, run="other").train
        assert_same(arrays(without_journal.iterate(start, start + 3)), expected[start : start + 3])


def count_reads(stream):
    """The samples that a stream tokenises from now on, each an epoch and a record."""
    read, tasks = collections.Counter(), type(stream.rows).block_task

    class Counting(type(stream.rows)):
        def block_task(self, place):
            task = tasks(self, place)
            read.update((place[1], task.samples.origin(index)) for index in range(len(task.samples)))
            return task

    object.__setattr__(stream.rows, "__class__", Counting)
    return read


def test_a_resumed_stream_reads_only_the_rows_that_it_stopped_in(prepare_stage, files):
    list(prepare_stage("sft").train.iterate(0, 60))
    entries = [json.loads(line) for line in (files / "run/stream.jsonl").read_text().splitlines()]
    last = max(entries, key=lambda entry: entry["step"])
    assert all(position[0] > 0 for _, position in last["lanes"]), "the last entry was to be in a later epoch"
    stream = prepare_stage("sft").train
    read = count_reads(stream)
    stream.batch(last["step"])
    assert sum(read.values()) < SAMPLES


def shares(stream_of, count):
    """The streams of `count` processes, each with its rows of every update."""
    for process in range(count):
        stream, rows = stream_of(process), range(process * LANES // count, (process + 1) * LANES // count)
        stream.share(rows, rows)
        yield stream, rows


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "pt"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_read_their_rows_of_the_same_batches_and_no_others(processes, stage, prepare_stage):
    full = list(prepare_stage(stage, run="alone").train.iterate(0, 12))
    for start in (0, 5):  # 5 is in no journal of these processes
        reads, tokens = list[set[int]](), np.zeros((12 - start, 2), np.int64)
        for stream, rows in shares(lambda number: prepare_stage(stage, run=f"process{number}").train, processes):
            read = count_reads(stream)
            for index, batch in enumerate(stream.iterate(start, 12)):
                for name, array in batch.arrays.items():
                    chosen = array.reshape(LANES, -1)
                    expected = full[start + index].arrays[name].reshape(LANES, -1)
                    assert np.array_equal(chosen[rows], expected[rows])
                    assert not np.delete(chosen, rows, 0).any()
                tokens[index] += batch.counts or [
                    np.count_nonzero(batch.arrays[name]) for name in ("segment_ids", "weights")
                ]
            reads.append(set(read))
        assert sum(len(read) for read in reads) == len(set().union(*reads)), "a sample was read by two processes"
        for counted, batch in zip(tokens, full[start:], strict=True):
            assert counted.tolist() == [np.count_nonzero(batch.arrays[name]) for name in ("segment_ids", "weights")]


def test_a_stream_goes_on_exactly_with_another_number_of_processes(prepare_stage):
    expected = arrays(prepare_stage("sft", run="alone").train.iterate(0, 40))
    for stream, _ in shares(lambda _: prepare_stage("sft").train, 4):
        list(stream.iterate(0, 36))
    stream = prepare_stage("sft").train
    read = count_reads(stream)
    assert_same(arrays(stream.iterate(35, 40)), expected[35:])
    assert sum(read.values()) < 2 * SAMPLES, "it was to begin at the journals' entries of update 32"


def test_batches_are_the_same_with_any_number_of_workers_and_a_worker_that_dies_is_named(prepare_stage):
    expected = arrays(prepare_stage("dpo", run="alone").train.iterate(0, 40))
    stream = prepare_stage("dpo").train
    stream.workers = 2
    assert_same(arrays(stream.iterate(0, 33)), expected[:33])
    assert_same(arrays(stream.iterate(33, 40)), expected[33:])
    stream.workers = 3
    batches = stream.iterate(0, 60)
    next(batches)
    children = pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    for child in map(int, children):
        if b"meshtune.data.tasks" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(child, signal.SIGKILL)
    with pytest.raises(UserError, match="SIGKILL"):
        list(batches)


def test_the_weights_of_a_loss_over_all_rows_are_computed_from_all_rows(prepare_stage):
    """Cross-entropy of chosen answers is divided by the tokens of the whole update."""
    expected = arrays(prepare_stage("orpo", run="alone").train.iterate(0, 4))
    for stream, _ in shares(lambda _: prepare_stage("orpo").train, 2):
        assert stream.rows.units.nll_mean == "tokens"
        assert_same(arrays(stream.iterate(0, 4)), expected)


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


def test_the_report_estimates_from_the_first_samples(prepare_stage):
    report = prepare_stage("dpo").report
    exact = prepare_stage("dpo", streaming=False).report
    assert report.samples == exact.samples == SAMPLES
    assert report.samples_left_out == 0
    assert report.efficiency == pytest.approx(exact.efficiency, abs=0.1)
    assert report.counts.tokens == pytest.approx(60 * 4 * 320 * exact.efficiency, rel=0.15)
    assert f"{SAMPLES:,}" in report.notes[0]


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


def test_the_first_examples_of_a_stream_are_those_of_its_first_samples(prepare_stage):
    rows = prepare_stage("dpo", "data.shuffle=false").train.rows
    assert [example.origin.record for example in rows.first_examples(3)] == [0, 0, 1]
    assert len(rows.first_examples(10_000)) == 2 * SAMPLES
