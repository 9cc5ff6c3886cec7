"""Files that grow: nothing is lost, nothing comes twice, and a file that was replaced is seen."""

from __future__ import annotations

import json
import os
import pathlib
import zlib

from meshtune.board.follow import START, all_rows, last_update, log_end, plain, read_lines, read_text


def line(**row: object) -> bytes:
    content = json.dumps(row)[:-1]
    return f'{content}, "crc32": {zlib.crc32(content.encode())}}}\n'.encode()


def test_a_line_is_read_once_it_is_whole(tmp_path: pathlib.Path):
    path = tmp_path / "file"
    assert read_lines(path).content == b""
    path.write_bytes(b"one\ntw")
    first = read_lines(path)
    assert first.content == b"one\n"
    with path.open("ab") as file:
        file.write(b"o\n")
    second = read_lines(path, first.cursor)
    assert (second.content, second.reset) == (b"two\n", False)
    assert read_lines(path, second.cursor).content == b""


def test_a_file_that_was_replaced_or_cut_begins_anew(tmp_path: pathlib.Path):
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    cursor = read_lines(path).cursor
    path.write_bytes(b"new\n")  # shorter
    assert (read_lines(path, cursor).content, read_lines(path, cursor).reset) == (b"new\n", True)
    draft = tmp_path / "draft"
    draft.write_bytes(b"another file\nof more lines\n")
    os.replace(draft, path)
    assert read_lines(path, cursor).reset
    assert read_lines(path, "nonsense").content.startswith(b"another")
    path.unlink()
    missing = read_lines(path, cursor)
    assert (missing.content, missing.cursor, missing.reset) == (b"", START, True)


def test_text_is_cut_between_characters(tmp_path: pathlib.Path):
    path = tmp_path / "log"
    expected = "日本語 – é 🙂\n" * 50
    path.write_bytes(expected.encode())
    for limit in range(4, 14):
        text, cursor = "", START
        while (news := read_text(path, cursor, limit=limit)).content:
            text, cursor = text + news.content.decode("utf-8"), news.cursor
        assert text == expected
    path.write_bytes(b"broken \xff\xff bytes")
    assert read_text(path).content.decode("utf-8", "replace").startswith("broken")


def test_a_reader_that_slept_while_megabytes_were_printed_gets_the_end(tmp_path: pathlib.Path):
    path = tmp_path / "log"
    path.write_bytes(b"first\n")
    cursor = read_text(path).cursor
    path.write_bytes(b"first\n" + b"".join(b"line %d\n" % number for number in range(300_000)))
    news = read_text(path, cursor, limit=1000, behind=1000)
    assert news.skipped > 3_000_000
    assert news.content.startswith(b"line ")
    assert news.content.endswith(b"line 299999\n") or read_text(path, news.cursor).content.endswith(b"line 299999\n")


def test_broken_lines_are_counted_and_left_out(tmp_path: pathlib.Path):
    good = line(kind="train", step=1, loss=float("nan"), memory=1)
    damaged = line(kind="train", step=2, loss=0.5, memory=1).replace(b"0.5", b"0.7")
    (tmp_path / "metrics.jsonl").write_bytes(
        good + damaged + b"not json\n" + line(kind="train", step=3, loss=1.0) + b"{"
    )
    answer = all_rows(tmp_path, "metrics.jsonl")
    assert [row["step"] for row in answer["rows"]] == [1, 3]
    assert answer["rows"][0]["loss"] is None  # JSON has no NaN
    assert answer["broken"] == 2
    assert last_update(tmp_path)["step"] == 3
    assert all_rows(tmp_path, "metrics.jsonl", answer["cursor"])["rows"] == []
    assert plain({"a": [float("inf"), 1.5]}) == {"a": [None, 1.5]}


def test_what_a_command_said_last(tmp_path: pathlib.Path):
    path = tmp_path / "log"
    path.write_text("x\n" * 9000 + "error: no such file\nwhere: recipe\n")
    assert log_end(path) == "error: no such file\nwhere: recipe"
    path.write_text("a\nb\n")
    assert log_end(path) == "a\nb"
    assert log_end(tmp_path / "none") == ""
