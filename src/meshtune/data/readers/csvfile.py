"""CSV records (RFC 4180, the first line being the header). Every value is the text in the file, but for columns of
conversations, whose cells are JSON.

CSV is not read through `datasets`, whose reader guesses types: an answer "NA" would become null and "007" a number.
"""

from __future__ import annotations

import array
import collections
import csv
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshtune.data.readers.textfiles import (
    FileRecords,
    MappedFile,
    check_nesting,
    line_origin,
    offset_type,
    readable,
)
from meshtune.errors import UserError, amount

MAX_COLUMNS = 10_000
PROBED = 20  # records that say which columns hold conversations
# Keys of a turn in the forms that conversations have.
TURNS = ({"role", "content"}, {"from", "value"})
# The beginning of a list of objects, in JSON or as Python writes it.
TURN_LIST = re.compile(r"\s*\[\s*\{\s*[\"'](?:role|content|from|value)[\"']")
MAX_FIELD = 2**31 - 1  # the csv module's default limit of 128 KiB is shorter than many an answer
csv.field_size_limit(MAX_FIELD)


def open_csv(path: pathlib.Path, name: str, *, delimiter: str = ",") -> FileRecords:
    """The records of a CSV file, as dicts of text; a column whose first cells are all JSON lists of turns has lists.

    Raises UserError for a header that is missing or repeats a name and for a quote that is never closed, and on reading
    a record with more or fewer fields than the header; each names the line.
    """
    file = MappedFile(path, name)
    flat = array.array("q", itertools.chain.from_iterable(_spans(file, delimiter)))
    spans = np.frombuffer(flat, np.int64).reshape(-1, 2).astype(offset_type(len(file.view)))
    if not len(spans):
        raise UserError("the file contains no records", where=name, fix="write records into it, or leave it out")
    header = [field.strip() for field in _fields(file, int(spans[0, 0]), int(spans[0, 1]), delimiter)]
    _check_header(header, name)
    if len(spans) == 1:
        raise UserError("the file contains a header and no records", where=name, fix="write records into it")
    decode = functools.partial(_decode, header=header, delimiter=delimiter)
    return FileRecords(
        file, spans[1:], functools.partial(decode, conversations=_conversations(file, spans[1:], decode))
    )


def _check_header(header: Sequence[str], name: str) -> None:
    repeated = [field for field, count in collections.Counter(header).items() if count > 1][:5]
    if len(header) > MAX_COLUMNS:
        raise UserError(
            f"the header has {len(header):,} columns, and at most {MAX_COLUMNS:,} are read",
            where=f"{name}, line 1",
            fix="give the file that has the columns of text, such as prompt and completion",
        )
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


def _conversations(
    file: MappedFile, spans: np.ndarray, decode: Callable[[MappedFile, int, int, int], dict[str, object]]
) -> frozenset[str]:
    """The columns whose cells, as far as the first records have them, are all JSON lists of turns."""
    lists: dict[str, bool] = {}  # whether a column had nothing but lists of turns so far
    for index, (begin, end) in enumerate(spans[:PROBED].tolist()):
        try:
            record = decode(file, index, begin, end)
        except UserError:  # reported where the record is read
            continue
        for column, cell in record.items():
            if cell:
                lists[column] = lists.get(column, True) and _is_conversation(str(cell))
    return frozenset(column for column, is_list in lists.items() if is_list)


def _is_conversation(cell: str) -> bool:
    """Whether a cell is, or was meant to be, a JSON list of turns."""
    if not cell.lstrip().startswith("["):
        return False
    try:
        check_nesting(cell)
        turns = json.loads(cell)
    except ValueError:
        return bool(TURN_LIST.match(cell))  # said to be no JSON where the record is read
    return bool(turns) and all(isinstance(turn, dict) and any(keys <= turn.keys() for keys in TURNS) for turn in turns)


def _decode(
    file: MappedFile,
    index: int,
    begin: int,
    end: int,
    *,
    header: Sequence[str],
    delimiter: str,
    conversations: frozenset[str] = frozenset(),
) -> dict[str, object]:
    fields = _fields(file, begin, end, delimiter)
    if len(fields) != len(header):
        raise UserError(
            f"the record has {amount(len(fields), 'field')}, but the header has {len(header)}: "
            + ", ".join(header[:20]),
            where=line_origin(file, index, begin),
            fix="put fields that contain a comma or a line break in double quotes",
        )
    record: dict[str, object] = dict(zip(header, fields, strict=True))
    for column in conversations:
        record[column] = _turns(str(record[column]), f"{line_origin(file, index, begin)}, field '{column}'")
    return record


def _turns(cell: str, where: str) -> object:
    """The list in a cell of a column of conversations; None in an empty one."""
    if not cell.strip():
        return None
    try:
        check_nesting(cell)
        return json.loads(cell)
    except ValueError as error:
        fix = "correct it; a quote inside a cell is written twice"
        if cell.lstrip("[ {\n").startswith("'"):
            fix = "write the column with json.dumps; str() and pandas write Python's spelling"
        raise UserError(
            f"the cells of this column are JSON, and this one is not: {readable(error)}", where=where, fix=fix
        ) from None
