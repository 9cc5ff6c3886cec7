"""A stream reads parquet by row groups, with the same batches wherever the file is, and decodes each group once."""

from __future__ import annotations

import pathlib
import random

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import meshtune.quickstart
from data.test_remote import folder  # noqa: F401 - a fixture
from data.test_stream import arrays, assert_same
from meshtune.config.load import load_recipe
from meshtune.data.packing import shuffle_order
from meshtune.data.prepare import prepare_data
from meshtune.data.readers import parquet, remote
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
GROUP, GROUPS = 2000, 8


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL, "plain")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of eight row groups; windows are of two."""
    monkeypatch.setattr(parquet, "SHUFFLE_WINDOW", 2 * GROUP << 10)
    monkeypatch.setattr("meshtune.data.documents.SHUFFLE_WINDOW", 2 * GROUP << 10)
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "1")
    return write(tmp_path / "chats.parquet")


def write(path, groups=GROUPS, group=GROUP):
    rng = random.Random(0)
    rows = [
        {"instruction": f"What is {n}?", "output": f"It is {n % 77}.", "note": rng.randbytes(100).hex()}
        for n in range(groups * group)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


@pytest.fixture
def decoded(monkeypatch):
    """The first records of the runs that were decoded, but for the thousands that formats are detected from."""
    begins, decode = [], parquet._ParquetReader.decode

    def count(self, begin, end, name):
        if end - begin > 1000:
            begins.append(begin)
        return decode(self, begin, end, name)

    monkeypatch.setattr(parquet._ParquetReader, "decode", count)
    return begins


def open_stream(tmp_path, tokenizer, source, *overrides, **data):
    fields = {
        "model": {"path": str(MODEL), "chat_template": "plain"},
        "data": {"train": source, "streaming": True, "max_length": 128, **data},
        "train": {"steps": 1000, "batch_size": 8},
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "run").mkdir(exist_ok=True)
    return prepare_data(load_recipe(fields, overrides), tokenizer, cache=tmp_path / "cache").train


def read_last(stream):
    """The tokens of the last samples of an epoch, which are in another window than the first."""
    rows = stream.rows
    return [example.ids.tolist() for example in rows.tokenise(rows.block_task((0, 0, rows.blocks(0) - 1))).examples]


def test_a_file_of_one_window_is_in_the_order_of_all_its_records(tmp_path, tokenizer):
    stream = open_stream(tmp_path, tokenizer, str(write(tmp_path / "a.parquet")))
    assert np.array_equal(stream.rows.order(3), shuffle_order(GROUP * GROUPS, 0, 3))


def test_an_epoch_decodes_each_row_group_once(file, tmp_path, tokenizer, decoded):
    stream = open_stream(tmp_path, tokenizer, str(file))
    order = stream.rows.order(0)
    assert sorted(order) == list(range(GROUP * GROUPS))
    windows = order.reshape(-1, 2 * GROUP) // (2 * GROUP)
    assert (windows == windows[:, :1]).all()
    assert sorted(windows[:, 0]) == [0, 1, 2, 3]
    assert not np.array_equal(windows, stream.rows.order(1).reshape(-1, 2 * GROUP) // (2 * GROUP))
    assert (np.diff(order) < 0).mean() > 0.4, "random within a window"
    numbers = np.arange(0, len(order), 64)
    for start in numbers:
        stream.documents.take(order[start : start + 64]).compact()
    assert sorted(decoded) == list(range(0, GROUP * GROUPS, GROUP))


def test_batches_are_the_same_from_any_place_and_step(file, folder, tmp_path, tokenizer):  # noqa: F811
    url, system = folder
    if not url.startswith("s3"):
        system.makedirs(url, exist_ok=True)
    system.pipe_file(f"{url}/chats.parquet", file.read_bytes())
    expected = arrays(open_stream(tmp_path, tokenizer, str(file)).iterate(0, 20))
    (tmp_path / "x").mkdir()
    for source in (f"{url}/chats.parquet", url):
        stream = open_stream(tmp_path / "x", tokenizer, source)
        assert_same(arrays(stream.iterate(0, 20)), expected)
        assert_same(arrays(stream.iterate(16, 20)), expected[16:])
    assert not (tmp_path / "cache/downloads").exists(), "no copy"
    (tmp_path / "x/run/stream.jsonl").unlink()
    assert_same(arrays(open_stream(tmp_path / "x", tokenizer, str(file)).iterate(16, 20)), expected[16:])


def test_a_process_reads_its_rows_of_the_same_batches(file, tmp_path, tokenizer, monkeypatch):
    expected = arrays(open_stream(tmp_path, tokenizer, str(file)).iterate(0, 20))
    monkeypatch.setenv("MESHTUNE_DATA_PROCESSES", "2")
    stream = open_stream(tmp_path, tokenizer, str(file))
    assert stream.workers == 2
    stream.share(range(4, 8), range(4, 8))
    for batch, whole in zip(stream.iterate(0, 20), expected, strict=True):
        assert all(
            np.array_equal(batch.arrays[name].reshape(8, -1)[4:], whole[name].reshape(8, -1)[4:]) for name in whole
        )


def test_windows_leave_the_places_of_sources_as_they_are(file, tmp_path, tokenizer):
    (tmp_path / "small.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 900)
    sources = [{"path": str(file), "weight": 3}, {"path": str(tmp_path / "small.jsonl"), "weight": 1}]
    stream = open_stream(tmp_path, tokenizer, sources, mixing="interleave_over")
    documents, order = stream.documents, stream.rows.order(0)
    plain = shuffle_order(len(documents), 0, 0)
    assert np.array_equal(documents.source[order], documents.source[plain])
    small = documents.source[plain] == 1
    assert np.array_equal(order[small], plain[small])
    assert sorted(order) == sorted(plain)


def test_a_large_row_group_is_divided(tmp_path):
    groups = np.array([[1_000_000, 300 << 20], [0, 0], [500, 1 << 30]])
    begins, sizes = parquet._runs(groups, whole=True)
    assert begins.tolist()[-2:] == [1_000_000, 1_000_500]
    assert len(begins) == 1_000_000 * 1024 // parquet.SHUFFLE_WINDOW + 1 + 3
    assert sizes[:-2].max() <= parquet.SHUFFLE_WINDOW + 1000 * 1024
    assert not (begins[:-2] % 1000).any()


def test_what_is_decoded_is_bounded():
    cache, table = parquet.RunCache(2500), pyarrow.table({"a": np.zeros(125)})
    for number in range(5):
        cache.table(number, lambda: table)
    assert list(cache._tables) == [3, 4]
    cache.table(3, lambda: table)
    cache.table(5, lambda: table)
    assert list(cache._tables) == [3, 5], "those used last"


@pytest.mark.parametrize("skip", [False, True])
def test_a_file_that_changes_during_a_run_is_named(file, tmp_path, tokenizer, skip):
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/chats.parquet", file.read_bytes())
    overrides = ["data.on_bad=skip"] if skip else []
    stream = open_stream(tmp_path, tokenizer, "memory://bucket/chats.parquet", *overrides)
    memory.pipe("/bucket/chats.parquet", write(tmp_path / "b.parquet", group=GROUP + 1).read_bytes())
    with pytest.raises(UserError, match="changed while it was read") as caught:
        read_last(stream)
    assert "chats.parquet" in caught.value.where


def test_a_store_that_fails_during_a_run_is_named_even_where_records_are_skipped(
    file, tmp_path, tokenizer, monkeypatch
):
    fsspec.filesystem("memory").pipe("/bucket/chats.parquet", file.read_bytes())
    stream = open_stream(tmp_path, tokenizer, "memory://bucket/chats.parquet", "data.on_bad=skip")

    def refuse(address):
        raise UserError("the address cannot be used: no route", where=address)

    monkeypatch.setattr(remote, "file_state", refuse)
    with pytest.raises(UserError, match="no route"):
        read_last(stream)
