"""CSV records (RFC 4180, the first line being the header). Every value is the text in the file.

CSV is not read through `datasets`, whose reader guesses types: an answer "NA" would become null and "007" a number.
"""

from __future__ import annotations

import array
import csv
import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from meshtune.data.readers.mapped import MappedFile
from meshtune.data.readers.records import FileRecords, line_origin
from meshtune.errors import UserError

MAX_FIELD = 2**31 - 1  # the csv module's default limit of 128 KiB is shorter than many an answer


def open_csv(path: pathlib.Path, name: str, *, delimiter: str = ",") -> FileRecords:
    """The records of a CSV file, as dicts of text.

    Raises UserError for a header that is missing or repeats a name and for a quote that is never closed, and on reading
    a record with more or fewer fields than the header; each names the line.
    """
    csv.field_size_limit(MAX_FIELD)
    file = MappedFile(path, name)
    flat = array.array("q", itertools.chain.from_iterable(_spans(file, delimiter)))
    spans = np.array(flat, np.int64).reshape(-1, 2)
    if not len(spans):
        raise UserError("the file contains no records", where=name, fix="write records into it, or leave it out")
    header = [field.strip() for field in _fields(file, int(spans[0, 0]), int(spans[0, 1]), delimiter)]
    _check_header(header, name)
    if len(spans) == 1:
        raise UserError("the file contains a header and no records", where=name, fix="write records into it")
    return FileRecords(file, spans[1:], functools.partial(_decode, header=header, delimiter=delimiter))


def _check_header(header: Sequence[str], name: str) -> None:
    repeated = {field for field in header if header.count(field) > 1}
    if repeated:
        problem = f"the header names {', '.join(sorted(map(repr, repeated)))} more than once"
    elif "" in header:
        problem = "the header has a column without a name"
    else:
        return
    raise UserError(problem, where=f"{name}, line 1", fix="give every column a name of its own")


def _lines(file: MappedFile) -> Iterator[tuple[int, int]]:
    begin, size = file.start, len(file.view)
    while begin < size:
        end = file.view.find(b"\n", begin) + 1 or size
        yield begin, end
        begin = end


def _spans(file: MappedFile, delimiter: str) -> Iterator[tuple[int, int]]:
    """The first byte of each record and the one after its last. A quoted field may contain line breaks, so the csv
    reader decides how many lines a record takes."""
    begin = end = file.start

    def lines() -> Iterator[str]:
        nonlocal end
        for line_begin, line_end in _lines(file):
            end = line_end
            yield file.text(line_begin, line_end)

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"malformed CSV: {error}, in the record near: {file.excerpt(begin)}",
                where=f"{file.name}, line {file.line(begin)}",
                fix='close every quote; write a quote inside quotes as ""',
            ) from None
        if fields is None:
            return
        if fields:
            yield begin, end
        begin = end


def _fields(file: MappedFile, begin: int, end: int, delimiter: str) -> list[str]:
    return next(csv.reader([file.text(begin, end)], delimiter=delimiter))


def _decode(
    file: MappedFile, index: int, begin: int, end: int, *, header: Sequence[str], delimiter: str
) -> dict[str, str]:
    fields = _fields(file, begin, end, delimiter)
    if len(fields) != len(header):
        raise UserError(
            f"the record has {len(fields)} fields, but the header has {len(header)}: {', '.join(header)}",
            where=line_origin(file, index, begin),
            fix="put fields that contain a comma or a line break in double quotes",
        )
    return dict(zip(header, fields, strict=True))
