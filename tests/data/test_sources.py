"""Sources are read lazily and exactly; what cannot be read says file, line and column, and what to do."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.reading import fails, read
from meshtune.data.checking import check_source
from meshtune.data.sources import COMPRESSIBLE, READERS, DataSource, open_path
from meshtune.errors import UserError

RECORDS = [{"instruction": "one", "output": 'say "hi"\n[{,}]'}, {"text": "köln \\ 漢字"}, {"n": [1, {"a": None}]}]


def write_json(path, records, style: str) -> None:
    if style == "lines":
        path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    elif style == "blank lines":
        path.write_text(
            "\n\r\n" + "\r\n   \n".join(json.dumps(record, ensure_ascii=False) for record in records), "utf-8"
        )
    elif style == "pretty":
        path.write_text(json.dumps(records, indent=4, ensure_ascii=False), "utf-8")
    elif style == "pretty objects":
        path.write_text("\n".join(json.dumps(record, indent=2) for record in records))
    elif style == "byte order mark":
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(records).encode())
    else:
        path.write_text(json.dumps(records))


@pytest.mark.parametrize("style", ["array", "pretty", "lines", "blank lines", "pretty objects", "byte order mark"])
def test_json_of_every_layout_gives_the_records_written(tmp_path, style):
    path = tmp_path / "data.json"
    write_json(path, RECORDS, style)
    records = open_path(path, "data.json")
    assert len(records) == 3
    assert [records[index] for index in (2, 0, 1)] == [RECORDS[2], RECORDS[0], RECORDS[1]]
    assert str(records.origin(1)) == "data.json, record 1"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=5),
    style=st.sampled_from(["array", "pretty", "lines", "pretty objects"]),
)
def test_any_json_records_survive_as_the_standard_library_reads_them(tmp_path, records, style):
    path = tmp_path / "any.json"
    write_json(path, records, style)
    assert read(path) == records


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_json_is_read_correctly_or_reported_with_a_line(tmp_path, data):
    """The oracle is json.loads on the whole file: what it refuses, the reader must refuse too, and never with another
    kind of error."""
    text = json.dumps(RECORDS, indent=1, ensure_ascii=False)
    at = data.draw(st.integers(1, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", '"', "}", "]", ",", "{", "\\", "x"])) + text[at + 1 :]
    path = tmp_path / "cut.json"
    path.write_text(text, "utf-8")
    try:
        expected = json.loads(text)
    except ValueError:
        assert "line " in (fails(path).where or "")
    else:
        assert read(path) == expected


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ('[{"a": "b"},\n {"a": "c"\n', "line 3, column 1", "delimiter"),
        ('[{"a": "b"},\n {"a": "c",}]', "line 2, column 12", "enclosed in double quotes"),
        ('[{"a": "b"},\n {"a": "c"},\n]', "line 2, column 12", "comma after the last record"),
        ('[{"a": "b"}\n {"a": "c"}]', "line 2, column 2", "expected a comma"),
        ('[{"a": "b"},, {"a": "c"}]', "line 1, column 13", "expected a record"),
        ('[{"a": "b"}] {"a": "c"}', "line 1, column 14", "expected nothing more"),
        ('[{"a": "b"},\n {"a": "say "hi" now"},\n {"a": "d"}]', "line 2, column 14", "delimiter"),
        ('[{"a": "b"},\n {"a": "unclosed},\n {"a": "d"}]', "line 2, column 19", "control character"),
        ("hello", "line 1, column 1", "expected a list of records"),
        ("[1, 2]", "line 1, column 2", "expected a record"),
        ('[{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]", "line 1, column 2", "nested too deeply"),
        ('[{"a": ' + "9" * 5000 + "}]", "line 1, column 2", "digits"),
    ],
)
def test_malformed_json_names_line_column_and_surrounding_text(tmp_path, text, where, message):
    """Mistakes inside a record are where json.loads of the whole file puts them; those between records are our own."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    error = fails(path)
    assert error.where == f"{path}, {where}"
    assert error.what.startswith("malformed JSON")
    assert message in error.what
    assert "▸" in error.what
    if "delimiter" in message or "control" in message or "quotes" in message:
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads(text)
        assert where == f"line {caught.value.lineno}, column {caught.value.colno}"


def test_a_malformed_jsonl_line_is_named_and_the_others_stay_readable(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": "1"}\n\n{"a": "2\n{"a": "3"}\n')
    swept = read(path)
    assert swept[0] == {"a": "1"}
    assert swept[2] == {"a": "3"}
    assert isinstance(swept[1], UserError)
    assert swept[1].where == "data.jsonl, line 3, column 7"
    assert '{"a": ▸"2⏎' in swept[1].what


def test_bytes_that_are_not_utf8_are_located(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"a": "x"}\n{"a": "käse"}\n'.encode("latin-1"))
    error = fails(path)
    assert error.where == f"{path}, line 2, column 9"
    assert "0xe4" in error.what
    wide = tmp_path / "wide.json"
    wide.write_text('[{"a": 1}]', "utf-16")
    assert "UTF-16" in fails(wide).what


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_record_of_10_mb_is_read_whole(tmp_path, suffix):
    path = tmp_path / f"large{suffix}"
    answer = 'a"\\\n' * 2_500_000
    path.write_text(json.dumps({"text": answer}))
    assert open_path(path, "large")[0]["text"] == answer


def pack(path, data):
    """Writes `data`, packed as the name of the file says."""
    packed = gzip.compress(data) if path.suffix == ".gz" else pyarrow.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(packed)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "txt"])
def test_packed_files_read_like_plain_ones(tmp_path, kind, suffix):
    plain, packed = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}.{suffix}"
    plain.write_text({"json": '[{"a": "1"}]', "jsonl": '{"a": "1"}', "csv": "a\n1\n", "txt": "one\ntwo"}[kind])
    pack(packed, plain.read_bytes())
    assert read(packed) == read(plain)
    packed.write_bytes(packed.read_bytes()[:-5])
    assert "damaged or truncated" in fails(packed).what


def test_csv_keeps_every_value_as_the_text_that_was_written(tmp_path):
    rows = [{"q": "NA", "a": "007"}, {"q": 'two\nlines, "quoted"\r\n', "a": ""}, {"q": "x\u2028y", "a": "null"}]
    path = tmp_path / "data.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["q", "a"])
        writer.writeheader()
        writer.writerows(rows)
    records = open_path(path, "data.csv")
    assert [records[index] for index in range(3)] == rows
    assert records.where(2) == "data.csv, record 2 (line 6)"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a,b\n1,2\n3\n", "record 1 (line 3)", "the record has 1 field, but the header has 2: a, b"),
        ("a,b\n1,2,3\n", "record 0 (line 2)", "the record has 3 fields"),
        ('a,b\n1,"2\n3,4\n', "line 2", "malformed CSV"),
        ("a,a\n1,2\n", "line 1", "'a' more than once"),
        ("a,b\n", "", "no records"),
    ],
)
def test_malformed_csv_names_the_line(tmp_path, text, where, message):
    path = tmp_path / "data.csv"
    path.write_text(text)
    error = fails(path)
    assert message in error.what
    assert where in (error.where or "")


def test_every_line_of_text_that_is_not_blank_is_a_record(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"one\r\n\r\n  \ntwo\xc2\x85still two\nthree")
    assert [record["text"] for record in read(path)] == ["one", "two\x85still two", "three"]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "txt", "parquet", "arrow", "json.gz"])
def test_an_empty_file_is_named(tmp_path, kind):
    path = tmp_path / f"nothing.{kind}"
    path.write_bytes(gzip.compress(b"") if kind.endswith("gz") else b"")
    error = fails(path)
    assert error.what == "the file is empty"
    assert error.where == str(path)


@pytest.mark.parametrize(
    ("kind", "text"), [("json", "[]"), ("json", " \n"), ("jsonl", "\n\n"), ("txt", "\n \n"), ("csv", "\n")]
)
def test_a_file_without_records_is_named(tmp_path, kind, text):
    path = tmp_path / f"nothing.{kind}"
    path.write_text(text)
    assert fails(path).where.startswith(str(path))


def test_a_missing_path_suggests_near_names(tmp_path):
    (tmp_path / "train_data.jsonl").write_text("{}")
    error = fails(tmp_path / "trian_data.jsonl")
    assert "no such file" in error.what
    assert error.fix == f"did you mean {tmp_path / 'train_data.jsonl'}?"
    assert "train_data.jsonl" in fails(tmp_path / "train_data.json").fix
    deep = fails(tmp_path / "no" / "where" / "x.json")
    assert str(tmp_path / "no") in deep.what
    assert str(tmp_path) in deep.fix


def test_an_unsupported_extension_lists_the_supported_ones(tmp_path):
    for name in ("data.pkl", "data", "data.zip", "weights.gz"):
        (tmp_path / name).write_text("x")
        error = fails(tmp_path / name)
        assert ".jsonl" in error.fix
        assert ".parquet" in error.fix


def test_a_folder_is_read_in_the_order_of_its_files_whatever_their_types(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"n": 2}\n{"n": 3}\n')
    (folder / "a.jsonl").write_text('{"n": 1}\n')
    (folder / "README.md").write_text("about")
    (folder / ".hidden").write_text("x")
    records = open_path(folder, "parts/")
    assert list(records.sweep()) == [records[index] for index in range(3)] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert str(records.origin(2)) == "parts/b.jsonl, record 1"
    (folder / "c.csv").write_text("n\n4\n")
    records = open_path(folder, "parts/")
    assert [records[index]["n"] for index in range(4)] == [1, 2, 3, "4"]
    selected = pickle.loads(pickle.dumps(records.select(np.array([1, 3]))))
    assert [dict(record) for record in selected.sweep()] == [{"n": 2}, {"n": "4"}]
    assert [str(selected.origin(index)) for index in range(2)] == ["parts/b.jsonl, record 0", "parts/c.csv, record 0"]
    (folder / "c.csv").rename(folder / "c.bin")
    assert "c.bin" in fails(folder).what


def test_a_folder_without_data_is_named(tmp_path):
    (tmp_path / "inner").mkdir()
    error = fails(tmp_path)
    assert "contains no data files; it contains the folders inner" in error.what
    assert error.where == str(tmp_path)


@contextlib.contextmanager
def small_files():
    """No file may be larger than a MiB, as on a disk with no more room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_too_full_to_unpack_a_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 100_000))
    with small_files():
        error = fails(path)
    assert "cannot be unpacked: File too large" in error.what
    assert str(tmp_path) in error.where.split(", ")[1]
    assert "TMPDIR" in error.fix


def test_records_can_be_pickled(tmp_path):
    for name, text in (("a.json", json.dumps(RECORDS)), ("b.csv", "a\n1\n"), ("c.txt", "x\n")):
        path = tmp_path / name
        path.write_text(text)
        records = open_path(path, name)
        assert list(pickle.loads(pickle.dumps(records)).sweep()) == list(records.sweep())


def test_a_large_file_is_read_in_bounded_memory(tmp_path):
    """60 MB of records are passed through with less than 40 MB of memory that is not the file itself (RssAnon)."""
    path = tmp_path / "large.jsonl"
    record = json.dumps({"instruction": "x" * 300, "output": "y" * 300}) + "\n"
    path.write_text(record * 95_000)
    assert os.path.getsize(path) > 60_000_000
    code = (
        "import sys\n"
        "from meshtune.data.sources import open_path\n"
        "import pathlib\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon'))\n"
        "before = anonymous()\n"
        "records = open_path(pathlib.Path(sys.argv[1]), 'large')\n"
        "count = sum(1 for _ in records.sweep())\n"
        "print(count, anonymous() - before)\n"
    )
    if sys.platform != "linux":
        pytest.skip("reads /proc/self/status")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 95_000
    assert grown < 40_000


@pytest.mark.parametrize(("suffix", "command"), [(".bz2", "bzip2"), (".zip", "unzip")])
def test_a_file_packed_in_another_way_is_to_be_unpacked(tmp_path, suffix, command):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"packed")
    assert command in fails(path).fix


RECORD = b'{"text": "x"}\n'
HOSTILE = {
    "deep.jsonl": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n",
    "deep.json": b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b'}\n{"a": 1}\n',
    "open.json": b"[" * 300_000,
    "open objects.json": b'{"a":' * 300_000,
    "brackets.jsonl": b"[" * 300_000,
    "a little too deep.jsonl": b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}\n",
    "digits.jsonl": b'{"a": ' + b"9" * 5000 + b"}\n",
    "digits.json": b'[{"a": ' + b"9" * 5000 + b"}]",
    "zeros.jsonl": bytes(1_000_000),
    "commas.json": b"[" + b"," * 300_000 + b"]",
    "columns.csv": b",".join(b"c%d" % n for n in range(100_000)) + b"\n" + b"," * 99_999 + b"\n",
    "one name.csv": b"c," * 100_000 + b"\n1\n",
    "quote.csv": b'a,b\n"' + b"x" * 1_000_000,
    "lines.txt": b"\r\n" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_file_of_records_takes_long_or_ends_in_a_traceback(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(HOSTILE[name])
    before = time.process_time()
    assert fails(path).where.startswith(str(path))
    assert time.process_time() - before < 10, "a second or less each; without limits some took minutes"


@pytest.mark.parametrize("suffix", [*READERS, *(f"{suffix}.gz" for suffix in COMPRESSIBLE)])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_no_data(tmp_path, kind, suffix):
    """A read of a pipe that nobody writes to would never return, and one of /dev/zero never end."""
    path = tmp_path / f"data{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert fails(path).what == "this is neither a file nor a folder"
    assert "no data files" in fails(tmp_path).what, "in a folder they are not read either"


@pytest.mark.parametrize("name", ["jsonl.gz", "json.gz", "csv.gz", "tsv.gz", "txt.gz", "jsonl.zst"])
def test_a_small_packed_file_that_holds_gigabytes_is_refused(tmp_path, monkeypatch, name):
    """Here with lower limits. The fix is to unpack it oneself."""
    monkeypatch.setattr("meshtune.data.readers.textfiles.UNPACKED", 100_000)
    path = tmp_path / f"bomb.{name}"
    kind, suffix = name.split(".")
    plain = RECORD * 300_000
    pack(path, plain)
    error = fails(path)
    assert "no text is packed so tightly" in error.what
    if suffix == "zst" and shutil.which("zstd") is None:
        assert "zstd -d " in error.fix
        return
    subprocess.run(error.fix.rpartition("unpack it yourself: ")[2], shell=True, check=True)
    assert (tmp_path / f"bomb.{kind}").stat().st_size == len(plain)


@pytest.mark.parametrize("style", ["array", "pretty", "byte order mark"])
def test_an_array_in_a_jsonl_file_is_read_as_in_a_json_file(tmp_path, style):
    path = tmp_path / "data.jsonl"
    write_json(path, RECORDS, style)
    assert read(path) == RECORDS
    path.write_text("[1]\n[2]\n")
    assert read(path) == [[1], [2]], "a line for each record, and no array"


TURNS = [{"role": "user", "content": 'say "hi", [now]'}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("turns", [TURNS, [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]])
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_column_of_conversations_in_a_csv_file_is_read_as_lists(tmp_path, turns, delimiter):
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    rows = [
        {"id": str(n), "messages": json.dumps(turns), "answer": json.dumps(turns) if n else "text"} for n in range(30)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows([*rows, rows[0] | {"messages": ""}, rows[0] | {"messages": "[{"}])
    *records, empty, broken = read(path)
    assert records == [row | {"messages": turns} for row in rows], "a column that has other text too stays text"
    assert empty["messages"] is None
    assert isinstance(broken, UserError)
    assert broken.where == f"{path.name}, record 31 (line 33), field 'messages'"


def test_conversations_of_a_csv_file_are_tokenised_as_those_of_a_jsonl_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(TURNS)]])
    samples = []
    for name in ("a.jsonl", "a.csv"):
        checked = check_source(DataSource(path=str(tmp_path / name)), "error", 0, [], "documents")
        samples.append(checked.sample(0).messages)
    assert samples[0] == samples[1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_key_that_a_record_has_twice_is_an_error(name, tmp_path):
    file = tmp_path / name
    file.write_text('{"text": "a"}\n{"text": "b", "meta": {"id": 1, "id": 2}}\n')
    with pytest.raises(UserError, match="the key 'id' twice") as caught:
        check_source(DataSource(path=str(file)), "error", 0, [], "documents")
    assert "line 2" in str(caught.value.where)


def test_the_line_of_a_csv_record_is_named_once(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,id\na,1\nb\n")
    with pytest.raises(UserError) as caught:
        check_source(DataSource(path=str(file)), "error", 0, [], "documents")
    assert str(caught.value.where).count("(line 3)") == 1
    skipped = []
    check_source(DataSource(path=str(file)), "skip", 0, skipped, "documents")
    assert skipped[0].reason == "the record has 1 field, but the header has 2: text, id"


@pytest.mark.parametrize("kind", ["ipc", "stream", "parquet", "csv"])
def test_selected_records_are_read_in_another_process(tmp_path, hf_home, kind):
    """They are pickled for it, and keep their numbers."""
    table = pyarrow.table({"text": [f"text {number}" for number in range(50)]})
    path = tmp_path / f"a.{'arrow' if kind in ('ipc', 'stream') else kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif kind == "csv":
        path.write_text("text\n" + "".join(f"text {number}\n" for number in range(50)))
    else:
        with (pyarrow.ipc.new_file if kind == "ipc" else pyarrow.ipc.new_stream)(str(path), table.schema) as sink:
            sink.write_table(table)
    records = open_path(path, "a")
    assert list(records.files) == [path]
    selected = pickle.loads(pickle.dumps(records.select(np.array([3, 20, 49]))))
    assert [record["text"] for record in selected.sweep()] == ["text 3", "text 20", "text 49"]
    assert [selected.origin(index).record for index in range(3)] == [3, 20, 49]
    assert selected[1]["text"] == "text 20"
