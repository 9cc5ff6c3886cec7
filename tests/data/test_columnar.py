"""Parquet and Arrow files and saved data sets are read in place, in pieces, and say what is wrong with them."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pyarrow
import pytest

from data.reading import fails, read
from meshtune.data.readers import parquet
from meshtune.data.readers.parquet import RunCache
from meshtune.data.sources import open_path
from meshtune.errors import UserError

RECORDS = [{"instruction": "one", "output": 'say "hi"\n[{,}]'}, {"text": "köln \\ 漢字"}, {"n": [1, {"a": None}]}]


def test_parquet_and_arrow_give_the_records_written(tmp_path, hf_home):
    import datasets
    import pyarrow.parquet

    rows = [{"messages": [{"role": "user", "content": f"q{n}"}], "n": n} for n in range(600)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    stream = next((tmp_path / "saved").glob("*.arrow"))
    for path in (tmp_path / "a.parquet", tmp_path / "b.arrow", tmp_path / "saved", stream):
        records = open_path(path, path.name)
        assert list(records.sweep()) == rows
        assert records[599] == rows[599]
    assert not any(hf_home.rglob("*.arrow")), "parquet is read in place"
    stream = open_path(tmp_path / "a.parquet", "a").random_access(RunCache())
    assert list(stream.sweep()) == rows
    assert [stream[number] for number in (599, 0, 250)] == [rows[599], rows[0], rows[250]]
    chosen = pickle.loads(pickle.dumps(stream.select(np.array([3, 99, 100, 599]))))
    assert [(record, chosen.origin(index).record) for index, record in enumerate(chosen.sweep())] == [
        (rows[number], number) for number in (3, 99, 100, 599)
    ]
    assert not any(hf_home.rglob("*.arrow")), "a stream reads it in place too"


def test_a_parquet_file_of_one_row_group_is_read_in_pieces(tmp_path, hf_home):
    import pyarrow.parquet

    path, former = tmp_path / "a.parquet", pyarrow.default_memory_pool()
    texts = [f"{number} " * 200 for number in range(40_000)]  # 46 MB of text
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 1
    counting = pyarrow.proxy_memory_pool(former)
    pyarrow.set_memory_pool(counting)
    try:
        records = open_path(path, path.name)
        assert [record["text"] for record in records.sweep()] == texts
    finally:
        pyarrow.set_memory_pool(former)
        parquet._parquet_reader.cache_clear()  # what it holds belongs to the pool
    assert 0 < counting.max_memory() < 12e6
    assert records[39_999] == {"text": texts[-1]}
    assert records[3] == {"text": texts[3]}
    assert not any(hf_home.rglob("*.arrow"))


def test_parquet_is_read_across_row_groups_forwards_and_backwards(tmp_path, hf_home):
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(5000))}), path, row_group_size=1300)
    records = open_path(path, path.name)
    numbers = [0, 255, 256, 999, 1000, 1299, 1300, 4999, 2600, 2599, 7, 7]
    assert [records[number] for number in numbers] == [{"n": number} for number in numbers]
    chosen = pickle.loads(pickle.dumps(records.select(np.arange(1290, 2700)).select(np.array([5, 1400]))))
    assert [(record["n"], chosen.origin(index).record) for index, record in enumerate(chosen.sweep())] == [
        (1295, 1295),
        (2690, 2690),
    ]
    first = records[0]
    first["n"] = "changed"
    assert records[0] == {"n": 0}, "readers of a record may change it"


def test_a_parquet_file_that_another_one_replaced_is_not_taken_for_it(tmp_path, hf_home):
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["first"]}), path)
    stored = pickle.dumps(open_path(path, "a"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["second"]}), tmp_path / "b.parquet")
    os.replace(tmp_path / "b.parquet", path)
    parquet._parquet_reader.cache_clear()  # as in another process
    with pytest.raises(UserError, match="changed while it was read"):
        pickle.loads(stored)[0]


def test_a_parquet_file_that_changed_is_read_again(tmp_path, hf_home):
    import pyarrow.parquet

    for text in ("first", "second"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / "a.parquet")
        assert open_path(tmp_path / "a.parquet", "a")[0] == {"text": text}


def test_damaged_parquet_and_arrow_are_reported(tmp_path, hf_home):
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"]}), path)
    path.write_bytes(path.read_bytes()[:-6])
    assert "truncated" in fails(path).what
    path.write_bytes(b"PAR1" + b"garbage" * 9 + b"PAR1")
    assert "cannot read the parquet file" in fails(path).what
    path.write_text("a,b\n1,2\n")
    assert "not parquet" in fails(path).what
    arrow = tmp_path / "a.arrow"
    arrow.write_text("no arrow at all")
    assert "cannot read the arrow file" in fails(arrow).what


def test_a_saved_data_set_with_splits_lists_them(tmp_path):
    import datasets

    record = datasets.Dataset.from_list([{"text": "x"}])
    datasets.DatasetDict({"train": record, "test": record}).save_to_disk(tmp_path / "saved")
    assert len(open_path(tmp_path / "saved", "saved", split="test")) == 1
    error = fails(tmp_path / "saved", split="dev")
    assert error.fix == "set split to one of: test, train"


def test_fields_that_other_records_have_are_not_read_as_null_from_parquet(tmp_path, hf_home):
    """A struct of a column has the fields of all records: pyarrow's own reading shows the nulls."""
    import pyarrow.parquet

    path = tmp_path / "calls.parquet"
    records = [{"calls": [{"arguments": {"city": "Porto"}}], "note": None}, {"calls": [{"arguments": {"days": 2}}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    assert pyarrow.parquet.read_table(path).to_pylist()[1]["calls"] == [{"arguments": {"city": None, "days": 2}}]
    assert read(path) == [records[0], {**records[1], "note": None}]


def test_a_compressed_arrow_file_and_a_parquet_file_that_hold_gigabytes_are_refused(tmp_path, monkeypatch, hf_home):
    """Here with lower limits, and unharmed where the same text is written without compression."""
    import pyarrow.parquet

    monkeypatch.setattr("meshtune.data.readers.textfiles.UNPACKED", 100_000)
    monkeypatch.setattr("meshtune.data.readers.parquet._COPY", 100_000)
    table = pyarrow.table({"text": ["a" * 10**6] * 30})
    packed = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    for name, writer in (("a.arrow", pyarrow.ipc.new_file), ("b.arrow", pyarrow.ipc.new_stream)):
        with writer(str(tmp_path / name), table.schema, options=packed) as sink:
            sink.write_table(table, max_chunksize=1)
        assert "no text is packed so tightly" in fails(tmp_path / name).what
        with writer(str(tmp_path / name), table.schema) as sink:
            sink.write_table(table)
        assert len(read(tmp_path / name)) == 30
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for opened in (read, lambda path: open_path(path, "a").random_access(RunCache())[0]):
        with pytest.raises(UserError, match="no text is packed so tightly"):
            opened(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
    assert len(read(tmp_path / "a.parquet")) == 30


def test_an_arrow_file_that_is_written_to_while_it_is_read_is_named(tmp_path):

    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": ["x" * 1000] * 3})
    with pyarrow.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)
    records = open_path(path, "a.arrow")
    records.check_unchanged()
    with path.open("r+b") as file:
        file.write(file.read(1)[:0] or b"A")
    os.utime(path, (1e9, 1e9))
    with pytest.raises(UserError, match="changed while it was read"):
        records.check_unchanged()
