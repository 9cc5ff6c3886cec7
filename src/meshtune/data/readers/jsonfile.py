"""JSON records, read one at a time from an index of where each begins and ends.

Read here and not through `datasets`, which infers one schema for all records: it refuses records that differ from each
other, adds nulls to those that lack a key, and says of malformed JSON neither line nor column.
"""

from __future__ import annotations

import array
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.readers.mapped import MappedFile, line_spans
from meshtune.data.readers.records import one_by_one
from meshtune.errors import UserError

# A string, skipped whole (possessive, so that no string is too long), or a bracket.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
NEAR = 1 << 26  # bytes parsed to explain a mistake in a file that never closes


class JsonRecords:
    """Records of a .json (an array, or objects one after another) or .jsonl (an object a line) file.

    Raises UserError on opening where the array as a whole is broken, and on reading a record that is malformed, with
    line, column and the text around the place (RFC 8259).
    """

    def __init__(self, path: pathlib.Path, name: str, *, lines: bool):
        self.file = MappedFile(path, name)
        self.lines = lines or _looks_like_lines(self.file)
        self.spans = line_spans(self.file) if self.lines else _spans(self.file)
        if not len(self.spans):
            raise UserError("the file holds no records", where=name, fix="write records into it, or leave it out")

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Any:
        begin, end = (int(at) for at in self.spans[index])
        return parse(self.file, begin, end)

    def origin(self, index: int) -> Origin:
        return Origin(self.file.name, index)

    def where(self, index: int) -> str:
        return f"{self.origin(index)} (line {self.file.line(int(self.spans[index, 0]))})"

    def sweep(self) -> Iterator[Any | UserError]:
        return one_by_one(self)


def parse(file: MappedFile, begin: int, end: int) -> Any:
    """The JSON value at the bytes from `begin` to `end`; UserError with line and column where it is malformed."""
    text = file.text(begin, end)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _malformed(file, begin + len(text[: error.pos].encode()), error.msg) from None
    except RecursionError:
        raise _malformed(file, begin, "nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _malformed(file, begin, str(error)) from None


def _malformed(file: MappedFile, offset: int, what: str) -> UserError:
    return UserError(
        f"malformed JSON: {what[:1].lower()}{what[1:]}, near: {file.around(offset)}",
        where=f"{file.name}, {file.position(offset)}",
        fix="mend that place (▸); .jsonl needs one whole object on every line",
    )


def _looks_like_lines(file: MappedFile) -> bool:
    """A .json file whose first line is a whole object of its own, with another after it."""
    first = TOKEN.search(file.view, file.start)
    if first is None or first.group() != b"{":
        return False
    end = file.view.find(b"\n", first.start())
    if end < 0 or not file.view[end : end + 4096].strip():
        return False
    if any(file.view.find(alone, end) >= 0 for alone in (b"\n{\n", b"\n{\r\n")):  # objects spread over lines
        return False
    try:
        return isinstance(json.loads(file.view[first.start() : end]), dict)
    except ValueError:
        return False


def _spans(file: MappedFile) -> np.ndarray:
    """[n, 2] int64: begin and end of each record of an array, or of objects one after another."""
    spans = array.array("q")  # flat: begin, end, begin, end, ...; a list of pairs would take ten times the memory
    head = file.view[file.start : file.start + 4096].lstrip()[:1]
    listed = head == b"["
    depth, begin, last, closed = 0, 0, file.start, False
    if listed:
        last = file.view.find(b"[", file.start) + 1
    for token in TOKEN.finditer(file.view, last):
        at = token.start()
        kind = file.view[at : at + 1]
        if depth == 0:
            _check_gap(file, spans, last, at, listed, kind)
            if listed and kind == b"]":
                last, closed = token.end(), True
                break
            begin = at
        if kind in b"{[":
            depth += 1
        elif kind in b"}]":
            depth -= 1
        if depth == 0:
            spans.extend((begin, token.end()))
            last = token.end()
    if depth:
        raise _first_mistake(file, spans, begin, "the last record is not closed")
    rest = _skip_space(file, last)
    if listed and not closed:
        raise _first_mistake(file, spans, rest, "the list of records is not closed by ]")
    if rest < len(file.view):
        raise _first_mistake(file, spans, rest, "expected a list of records" if not spans else "expected nothing more")
    return np.array(spans, np.int64).reshape(-1, 2)


def _check_gap(file: MappedFile, spans: array.array[int], last: int, at: int, listed: bool, kind: bytes) -> None:
    """Between two records of an array stands exactly one comma, and nothing else but space."""
    gap = file.view[last:at].strip()
    closing = kind == b"]" and listed
    wanted = b"," if listed and spans and not closing else b""
    if gap == wanted and (closing or kind not in b"]}"):
        return
    at_fault = _skip_space(file, last)
    if gap[:1] == b"," and wanted:
        at_fault = _skip_space(file, at_fault + 1)
    if closing and gap == b",":
        what = "a comma after the last record"
    elif not gap and wanted:
        what = "expected a comma between records"
    else:
        what = "expected a record"
    raise _first_mistake(file, spans, at_fault, what)


def _first_mistake(file: MappedFile, spans: array.array[int], offset: int, what: str) -> UserError:
    """The error to show: a quote missing far above makes nonsense of all that follows, so look there first."""
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        try:
            parse(file, begin, end)
        except UserError as error:
            return error
    if what.startswith("the last record") and len(file.view) - offset <= NEAR:
        try:
            parse(file, offset, len(file.view))
        except UserError as error:
            return error
    return _malformed(file, min(offset, len(file.view)), what)


def _skip_space(file: MappedFile, at: int) -> int:
    found = re.compile(rb"\S").search(file.view, at)
    return found.start() if found else len(file.view)
