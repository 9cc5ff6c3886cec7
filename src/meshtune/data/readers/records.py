"""The interface of every reader: records by index, the origin of each, and one pass over all of them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.readers.mapped import MappedFile
from meshtune.errors import UserError


class Records(Protocol):
    """The records of one source, read on access.

    `records[i]` raises UserError where the record is malformed. `where(i)` describes the origin for people, with the
    line number where the file has lines. `sweep()` is the fast way to read all records in order; it yields the
    UserError in place of a record that cannot be read, so that one bad line does not end the pass.
    `check_unchanged()` raises UserError if the file has changed since it was opened.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...

    def origin(self, index: int) -> Origin: ...

    def where(self, index: int) -> str: ...

    def sweep(self) -> Iterator[object | UserError]: ...

    def check_unchanged(self) -> None: ...


def line_origin(file: MappedFile, index: int, begin: int) -> str:
    """The origin of record `index`, which begins at byte `begin`, with its line."""
    return f"{Origin(file.name, index)} (line {file.line(begin)})"


class FileRecords:
    """The records of a text file, from an index of their bytes.

    `spans` int64 [n, 2] are the first byte of each record and the one after its last. `decode(file, index, begin, end)`
    parses one record; it must be a module-level function or a partial of one, so that records can be pickled.
    """

    def __init__(self, file: MappedFile, spans: np.ndarray, decode: Callable[[MappedFile, int, int, int], object]):
        self.file, self.spans, self.decode = file, spans, decode

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> object:
        begin, end = (int(offset) for offset in self.spans[index])
        return self.decode(self.file, index, begin, end)

    def origin(self, index: int) -> Origin:
        return Origin(self.file.name, index)

    def where(self, index: int) -> str:
        return line_origin(self.file, index, int(self.spans[index, 0]))

    def sweep(self) -> Iterator[object | UserError]:
        for index in range(len(self)):
            try:
                yield self[index]
            except UserError as error:
                yield error

    def check_unchanged(self) -> None:
        self.file.check_unchanged()


class ConcatenatedRecords:
    """The records of several files in sequence. Each record keeps the name of its file and its index there."""

    def __init__(self, parts: Sequence[Records]):
        self.parts = list(parts)
        self.ends = list(itertools.accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def _locate(self, index: int) -> tuple[Records, int]:
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part - 1] if part else 0)

    def __getitem__(self, index: int) -> object:
        part, inner = self._locate(index)
        return part[inner]

    def origin(self, index: int) -> Origin:
        part, inner = self._locate(index)
        return part.origin(inner)

    def where(self, index: int) -> str:
        part, inner = self._locate(index)
        return part.where(inner)

    def sweep(self) -> Iterator[object | UserError]:
        return itertools.chain.from_iterable(part.sweep() for part in self.parts)

    def check_unchanged(self) -> None:
        for part in self.parts:
            part.check_unchanged()
