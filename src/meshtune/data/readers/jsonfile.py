"""JSON records, read one at a time from an index of their bytes.

JSON is not read through `datasets`, which infers one schema for all records: it refuses records that differ from each
other, adds nulls where a key is missing, and reports neither line nor column of malformed JSON.
"""

from __future__ import annotations

import array
import json
import pathlib
import re
from typing import Any

import numpy as np

from meshtune.data.readers.mapped import MappedFile, line_spans
from meshtune.data.readers.records import FileRecords
from meshtune.errors import UserError
from meshtune.json_text import object_of

# A whole string (possessive, so that no string is too long), or a bracket.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
DECODER = json.JSONDecoder(object_pairs_hook=object_of)
MAX_DEPTH = 100  # lists and objects within each other
MAX_REPARSED = 1 << 26  # bytes parsed again to explain a mistake in a file that is never closed


def open_json(path: pathlib.Path, name: str, *, lines: bool) -> FileRecords:
    """The records of a .json file (an array, or objects one after another) or, with `lines`, of a .jsonl file, which
    may hold an array too.

    Raises UserError where the array is malformed outside its records, and on reading a record that is malformed, with
    line, column and the surrounding text (RFC 8259).
    """
    file = MappedFile(path, name)
    as_lines = not _holds_array(file) if lines else _looks_like_lines(file)
    spans = line_spans(file) if as_lines else _spans(file)
    if not len(spans):
        raise UserError("the file contains no records", where=name, fix="write records into it, or leave it out")
    return FileRecords(file, spans, _decode_json)


def _decode_json(file: MappedFile, index: int, begin: int, end: int) -> object:
    return parse(file, begin, end)


def parse(file: MappedFile, begin: int, end: int) -> Any:
    """The JSON value in the bytes from `begin` to `end`. Raises UserError with line and column if it is malformed."""
    text = file.text(begin, end)
    try:
        check_nesting(text)
        return DECODER.decode(text)
    except ValueError as error:
        raise _malformed_value(file, begin, text, error) from None


def _malformed_value(file: MappedFile, begin: int, text: str, error: ValueError) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        return _malformed_error(file, begin + len(text[: error.pos].encode()), error.msg)
    return _malformed_error(file, begin, readable(error))


def readable(error: ValueError) -> str:
    """Describes a mistake in JSON text. Python's words for thousands of digits are for programmers."""
    return "a whole number of more than 4,300 digits" if "set_int_max_str_digits" in str(error) else str(error)


def check_nesting(text: str) -> None:
    """Raises ValueError for JSON of more than MAX_DEPTH levels: what reads it later calls itself for each."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for token in TOKEN.finditer(text.encode("utf-8", "surrogatepass")):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token.group(), 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested too deeply, more than {MAX_DEPTH} levels")


def _malformed_error(file: MappedFile, offset: int, problem: str) -> UserError:
    return UserError(
        f"malformed JSON: {problem[:1].lower()}{problem[1:]}, near: {file.excerpt(offset)}",
        where=f"{file.name}, {file.position(offset)}",
        fix="correct the file at the mark (▸); .jsonl needs one complete object on every line",
    )


def _holds_array(file: MappedFile) -> bool:
    """Whether a .jsonl file is one array, not lines whose first record is a list."""
    head = TOKEN.search(file.view, file.start)
    if head is None or head.group() != b"[" or file.view[file.start : head.start()].strip():
        return False
    return _is_one_array(file, head.start())


def _is_one_array(file: MappedFile, begin: int) -> bool:
    """Whether the list at `begin` is more than the record of one line."""
    end = file.view.find(b"\n", begin)
    if end < 0 or end - begin > MAX_REPARSED or not file.view[end : end + 4096].strip():
        return True
    try:
        return not isinstance(json.loads(file.view[begin:end]), list)
    except (ValueError, RecursionError):
        return True


def _looks_like_lines(file: MappedFile) -> bool:
    """Whether the first line of a .json file is a complete object, and more text follows. Raises UserError where it is
    nested too deeply to tell."""
    first = TOKEN.search(file.view, file.start)
    if first is None or first.group() != b"{":
        return False
    end = file.view.find(b"\n", first.start())
    if end < 0 or not file.view[end : end + 4096].strip():
        return False
    if any(file.view.find(brace, end) >= 0 for brace in (b"\n{\n", b"\n{\r\n")):  # objects of several lines
        return False
    try:
        return isinstance(json.loads(file.view[first.start() : end]), dict)
    except ValueError:
        return False
    except RecursionError:  # which layout it has cannot be told
        raise _malformed_error(file, first.start(), "nested too deeply") from None


def _spans(file: MappedFile) -> np.ndarray:
    """[n, 2] int64: first byte and end of each record of an array, or of objects one after another."""
    spans = array.array("q")  # flat: begin, end, begin, end, ...; a list of pairs would take ten times the memory
    head = file.view[file.start : file.start + 4096].lstrip()[:1]
    in_array = head == b"["
    depth, begin, last, closed = 0, 0, file.start, False
    if in_array:
        last = file.view.find(b"[", file.start) + 1
    for token in TOKEN.finditer(file.view, last):
        offset = token.start()
        character = file.view[offset : offset + 1]
        if depth == 0:
            _check_gap(file, spans, last, offset, in_array, character)
            if in_array and character == b"]":
                last, closed = token.end(), True
                break
            begin = offset
        if character in b"{[":
            depth += 1
        elif character in b"}]":
            depth -= 1
        if depth == 0:
            spans.extend((begin, token.end()))
            last = token.end()
    if depth:
        raise _first_mistake(file, spans, begin, "the last record is not closed")
    trailing = _skip_space(file, last)
    if in_array and not closed:
        raise _first_mistake(file, spans, trailing, "the list of records is not closed by ]")
    if trailing < len(file.view):
        problem = "expected a list of records" if not spans else "expected nothing more"
        raise _first_mistake(file, spans, trailing, problem)
    return np.array(spans, np.int64).reshape(-1, 2)


def _check_gap(
    file: MappedFile, spans: array.array[int], last: int, offset: int, in_array: bool, character: bytes
) -> None:
    """Raises UserError unless exactly one comma separates two records of an array, and otherwise only white space."""
    gap = file.view[last:offset].strip()
    closing = character == b"]" and in_array
    separator = b"," if in_array and spans and not closing else b""
    if gap == separator and (closing or character not in b"]}"):
        return
    mistake = _skip_space(file, last)
    if gap[:1] == b"," and separator:
        mistake = _skip_space(file, mistake + 1)
    if closing and gap == b",":
        problem = "a comma after the last record"
    elif not gap and separator:
        problem = "expected a comma between records"
    else:
        problem = "expected a record"
    raise _first_mistake(file, spans, mistake, problem)


def _first_mistake(file: MappedFile, spans: array.array[int], offset: int, problem: str) -> UserError:
    """The error to report. A missing quote far above makes nonsense of everything after it, so malformed records before
    `offset` are reported first."""
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        try:
            parse(file, begin, end)
        except UserError as error:
            return error
    if problem.startswith("the last record") and len(file.view) - offset <= MAX_REPARSED:
        try:
            parse(file, offset, len(file.view))
        except UserError as error:
            return error
    return _malformed_error(file, min(offset, len(file.view)), problem)


def _skip_space(file: MappedFile, offset: int) -> int:
    match = re.compile(rb"\S").search(file.view, offset)
    return match.start() if match else len(file.view)
