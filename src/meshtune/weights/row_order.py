"""Rows that lie in another order in memory than in files: those of one projection of queries, keys and values.

A file has all rows of queries, then all of keys, then all of values, each head by head. In memory a head's queries,
keys and values stand together: whatever splits the rows over devices then gives each whole heads, and their product
needs no exchange. Rows move in runs of one head; nothing but loading and writing need know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from meshtune.model.spec import PACKED, ModelSpec

PARTS = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """`rows` neighbours: from row `file` of the tensor on, and from row `memory` of the parameter on."""

    file: int
    memory: int
    rows: int


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Of `heads` heads with `head_dim` rows in each part."""

    heads: int
    head_dim: int

    def runs(self) -> list[Run]:
        """All rows, in the order of the file."""
        h, every = self.head_dim, ((part, head) for part in range(PARTS) for head in range(self.heads))
        return [Run((part * self.heads + head) * h, (head * PARTS + part) * h, h) for part, head in every]

    def between(self, start: int, stop: int) -> Iterator[Run]:
        """Rows start..stop of the parameter, in its order, cut where the file's order breaks."""
        h = self.head_dim
        while start < stop:
            head, part = divmod(start // h, PARTS)
            count = min(stop, (start // h + 1) * h) - start
            yield Run((part * self.heads + head) * h + start % h, start, count)
            start += count

    def in_memory(self, tensor: np.ndarray) -> np.ndarray:
        """A tensor of a file, whole, with its rows in memory's order."""
        parts = tensor.reshape(PARTS, self.heads, self.head_dim, *tensor.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(tensor.shape)


def row_order(spec: ModelSpec, axes: tuple[str, ...]) -> RowOrder | None:
    """The order of the rows of an array with these logical axes (none for stacked layers); None: as in files."""
    return RowOrder(spec.heads, spec.head_dim) if axes[0] == PACKED else None


def runs_of(order: RowOrder | None, rows: int) -> list[Run]:
    """All rows of a tensor, in the order of the file."""
    return [Run(0, 0, rows)] if order is None else order.runs()


def between(order: RowOrder | None, start: int, stop: int) -> Iterator[Run]:
    """Rows start..stop of a parameter, as runs of the file."""
    if order is None:
        yield Run(start, start, stop - start)
    else:
        yield from order.between(start, stop)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Runs of rows as one array."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
