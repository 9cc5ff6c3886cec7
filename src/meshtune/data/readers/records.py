"""What every reader of a source offers: records by number, where each came from, and one pass over all of them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from meshtune.data.conversation import Origin
from meshtune.errors import UserError


class Records(Protocol):
    """Records of one source, read when asked for.

    `records[i]` raises UserError where the file cannot be read as its kind. `where(i)` is the origin in words, with the
    line number where the file has lines. `sweep()` is the cheap way through all of them: each record in order, or the
    UserError that reading it gave, so that one bad line does not end the pass.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def origin(self, index: int) -> Origin: ...

    def where(self, index: int) -> str: ...

    def sweep(self) -> Iterator[Any | UserError]: ...


def one_by_one(records: Records) -> Iterator[Any | UserError]:
    """The sweep of a source whose single reads are already cheap."""
    for index in range(len(records)):
        try:
            yield records[index]
        except UserError as error:
            yield error


class Joined:
    """The records of several files, one file after the other; each record keeps its own file's name and number."""

    def __init__(self, parts: Sequence[Records]):
        self.parts = list(parts)
        self.ends = list(itertools.accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def _part(self, index: int) -> tuple[Records, int]:
        at = bisect.bisect_right(self.ends, index)
        return self.parts[at], index - (self.ends[at - 1] if at else 0)

    def __getitem__(self, index: int) -> Any:
        part, inner = self._part(index)
        return part[inner]

    def origin(self, index: int) -> Origin:
        part, inner = self._part(index)
        return part.origin(inner)

    def where(self, index: int) -> str:
        part, inner = self._part(index)
        return part.where(inner)

    def sweep(self) -> Iterator[Any | UserError]:
        return itertools.chain.from_iterable(part.sweep() for part in self.parts)
