"""The one reader of JSON in strangers' files: what it refuses, and that it reads what Python reads."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from meshtune.errors import UserError
from meshtune.json_text import MAX_BYTES, parse_json, read_json

WRONG = {
    b"[" * 200_000 + b"]" * 200_000: "nested more than 64",
    b'{"a":' * 100 + b"1" + b"}" * 100: "nested more than 64",
    b'{"a": 1, "b": {"a": 1, "a": 2}}': "has the key 'a' twice",
    b"1" * 5000: "5,000 digits",
    b"-" + b"1" * 309: "310 digits",
    b'{"a": "\xff"}': "not UTF-8 text: byte 7",
    b'{"a": 1,}': "malformed JSON",
    b"": "malformed JSON",
    b"\xef\xbb\xbf{}": "malformed JSON",
}


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_said(content: bytes):
    with pytest.raises(UserError, match=WRONG[content]):
        parse_json(content, "x.json")


def test_what_python_writes_is_read():
    value = {"a": [1, 2.5, None, True, "é\n", 10**300, -(2**63)], "b": {"c": [[[]]]}, "": float("inf")}
    assert parse_json(json.dumps(value).encode(), "x.json") == value
    assert parse_json(json.dumps(value, ensure_ascii=False), "x.json") == value
    assert parse_json("[" * 64 + "]" * 64, "x.json")


def test_only_files_of_a_sane_size_are_read(tmp_path: pathlib.Path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    (tmp_path / "list").write_text("[]")
    cases = {
        "pipe": "a pipe or a device",
        "large": "at most",
        "list": "expected a JSON object",
        "absent": "No such file",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            read_json(tmp_path / name)
    with pytest.raises(UserError, match="a folder"):
        read_json(tmp_path)
    with pytest.raises(UserError, match="device"):
        read_json(pathlib.Path("/dev/zero"))


def test_a_message_cannot_write_to_a_terminal():
    error = UserError("a\x1b[2J\ud800", where="b\r", fix="c\x9b\nd")
    assert str(error) == "a\\x1b[2J\\ud800\nwhere: b\\r\nfix: c\\x9b\nd"
    assert len(str(UserError("x" * 10**7))) < 20_000
