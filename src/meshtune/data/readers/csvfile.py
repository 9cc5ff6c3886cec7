"""CSV records (RFC 4180; first line is the header). Every value is the text that stands in the file.

Read here and not through `datasets`, whose reader guesses types: an answer "NA" would become null and "007" a number.
"""

from __future__ import annotations

import array
import csv
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.readers.mapped import MappedFile
from meshtune.data.readers.records import one_by_one
from meshtune.errors import UserError

LARGEST_FIELD = 2**31 - 1  # the csv module's own limit, 128 KiB, is smaller than many an answer


class CsvRecords:
    """Rows as dicts of text. Raises UserError for a header that is missing or repeats a name, for a row with more or
    fewer fields than the header, and for a quote that is never closed; each with its line."""

    def __init__(self, path: pathlib.Path, name: str, *, delimiter: str = ","):
        csv.field_size_limit(LARGEST_FIELD)
        self.file, self.delimiter = MappedFile(path, name), delimiter
        spans = np.array(array.array("q", itertools.chain.from_iterable(self._rows())), np.int64).reshape(-1, 2)
        if not len(spans):
            raise UserError("the file holds no records", where=name, fix="write records into it, or leave it out")
        self.header = [field.strip() for field in self._read(int(spans[0, 0]), int(spans[0, 1]))]
        twice = {field for field in self.header if self.header.count(field) > 1}
        if twice or "" in self.header:
            what = (
                f"names {', '.join(sorted(map(repr, twice)))} more than once" if twice else "has a column with no name"
            )
            raise UserError(f"the header {what}", where=f"{name}, line 1", fix="give every column a name of its own")
        if len(spans) == 1:
            raise UserError("the file holds a header and no records", where=name, fix="write records into it")
        self.spans = spans[1:]

    def _lines(self) -> Iterator[tuple[int, int]]:
        at, size = self.file.start, len(self.file.view)
        while at < size:
            end = self.file.view.find(b"\n", at) + 1 or size
            yield at, end
            at = end

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each row: a quoted field may hold line breaks, so the csv reader says how far a row goes."""
        consumed = [self.file.start, self.file.start]

        def feed() -> Iterator[str]:
            for begin, end in self._lines():
                consumed[1] = end
                yield self.file.text(begin, end)

        reader = csv.reader(feed(), delimiter=self.delimiter, strict=True)
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise UserError(
                    f"malformed CSV: {error}, in the row near: {self.file.around(consumed[0])}",
                    where=f"{self.file.name}, line {self.file.line(consumed[0])}",
                    fix='close every quote; write a quote inside quotes as ""',
                ) from None
            if row is None:
                return
            if row:
                yield consumed[0], consumed[1]
            consumed[0] = consumed[1]

    def _read(self, begin: int, end: int) -> list[str]:
        return next(csv.reader([self.file.text(begin, end)], delimiter=self.delimiter))

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, str]:
        begin, end = (int(at) for at in self.spans[index])
        row = self._read(begin, end)
        if len(row) != len(self.header):
            raise UserError(
                f"the row has {len(row)} fields, the header {len(self.header)}: {', '.join(self.header)}",
                where=self.where(index),
                fix="put fields that hold a comma or a line break in double quotes",
            )
        return dict(zip(self.header, row, strict=True))

    def origin(self, index: int) -> Origin:
        return Origin(self.file.name, index)

    def where(self, index: int) -> str:
        return f"{self.origin(index)} (line {self.file.line(int(self.spans[index, 0]))})"

    def sweep(self) -> Iterator[Any | UserError]:
        return one_by_one(self)
