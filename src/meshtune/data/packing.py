"""Assigns documents to rows: best-fit packing of a shuffled order, or one padded document per row.

Orders come from splitmix64 keys, not from a library's generator, so that they do not change with its version. Best-fit
decreasing (Johnson 1973) within windows of the shuffled order keeps rows full and the order random.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
WINDOW = 4096  # documents that may share a row


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The documents of each row: row r has `documents[starts[r] : starts[r + 1]]` in that order; both int64."""

    documents: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]


def random_keys(seed: int, stream: int, n: int) -> np.ndarray:
    """n random uint64, a pure function of seed and stream: splitmix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(_mix(np.asarray([seed], np.uint64)) + np.uint64(stream))
        return _mix(state + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffle_order(n: int, seed: int, stream: int) -> np.ndarray:
    """A random permutation of 0..n-1, int64, which does not change with the version of a library."""
    return np.argsort(random_keys(seed, stream, n), kind="stable")


def pack(lengths: np.ndarray, order: np.ndarray, row_length: int, *, window: int = WINDOW) -> PackedRows:
    """Packs the documents of `order` into rows of `row_length` positions, each document into exactly one row: best-fit
    decreasing (Johnson 1973) within windows of the order.

    `lengths` int [n] are the positions that each document takes, between 1 and `row_length`. Documents of a row keep
    their order, and rows are ordered by their longest documents, so that a shuffled order gives shuffled rows.
    """
    row_of = np.empty(len(order), np.int64)  # indexed by position in the order
    openers: list[int] = []
    for start in range(0, len(order), window):
        sizes = np.asarray(lengths[order[start : start + window]], np.int64)
        window_rows, window_openers = _best_fit_decreasing(sizes, row_length)
        row_of[start : start + window] = window_rows + len(openers)
        openers += [start + opener for opener in window_openers]
    rows = len(openers)
    rank = np.empty(rows, np.int64)
    # By the longest document: by the first one, rows of many short documents would come early in every epoch.
    rank[np.argsort(np.asarray(openers, np.int64), kind="stable")] = np.arange(rows)
    by_row = np.argsort(rank[row_of], kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rank[row_of], minlength=rows))]).astype(np.int64)
    return PackedRows(np.asarray(order, np.int64)[by_row], starts)


def unpacked_rows(order: np.ndarray) -> PackedRows:
    """One document per row."""
    return PackedRows(np.asarray(order, np.int64), np.arange(len(order) + 1, dtype=np.int64))


def padded_length(longest: int, max_length: int, *, multiple: int = 64) -> int:
    """Positions of a padded row: the longest document rounded up to a multiple, at most `max_length`."""
    return min(max_length, -(-max(longest, 1) // multiple) * multiple)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, list[int]]:
    """The row of each document, and the first document of each row. Documents are placed longest first, each into the
    fullest row with room for it."""
    row_of = np.empty(len(sizes), np.int64)
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set if some row has room r, so the least sufficient room is found by integer arithmetic
    openers: list[int] = []
    order = np.argsort(-sizes, kind="stable")
    for document, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        sufficient = rooms >> size
        if sufficient:
            room = size + (sufficient & -sufficient).bit_length() - 1
            candidates = rows_with_room[room]
            row = candidates.pop()
            if not candidates:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(openers)
            openers.append(document)
        row_of[document] = row
        remaining = room - size
        if remaining:
            rows_with_room.setdefault(remaining, []).append(row)
            rooms |= 1 << remaining
    return row_of, openers
