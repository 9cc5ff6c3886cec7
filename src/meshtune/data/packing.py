"""Orders and rows of documents.

Orders come from splitmix64 keys, not from a library's generator, so that they do not change with its version. Best-fit
decreasing (Johnson 1973) within windows of the shuffled order keeps rows full and the order random.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshtune.lazy import LazyFunction

best_fit_of_two = LazyFunction("meshtune.data.pictures.rows:best_fit_of_two")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
WINDOW = 4096  # documents that may share a row
_KEYS = 1 << 18  # random numbers computed at once, which bounds the memory


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The documents of each row: row r has `documents[starts[r] : starts[r + 1]]` in that order; both integers."""

    documents: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]


def random_keys(seed: int, stream: int, n: int) -> np.ndarray:
    """n random uint64, a pure function of seed and stream: splitmix64 (Steele, Lea, Flood 2014)."""
    keys = np.empty(n, np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(_mix(np.asarray([seed], np.uint64)) + np.uint64(stream))
        for start in range(0, n, _KEYS):
            numbers = np.arange(start + 1, min(n, start + _KEYS) + 1, dtype=np.uint64)
            keys[start : start + _KEYS] = _mix(state + numbers * _GOLDEN)
    return keys


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffle_order(n: int, seed: int, stream: int) -> np.ndarray:
    """A random permutation of 0..n-1, which does not change with the version of a library. It is of index_type(n)."""
    return np.argsort(random_keys(seed, stream, n), kind="stable").astype(index_type(n))


def index_type(n: int) -> type[np.integer]:
    """The smallest signed type of indices below n, which are many."""
    return np.int32 if n <= 1 << 31 else np.int64


def pack(
    lengths: np.ndarray,
    order: np.ndarray,
    row_length: int,
    *,
    window: int = WINDOW,
    patches: np.ndarray | None = None,
    max_patches: int = 0,
) -> PackedRows:
    """Packs the documents of `order` into rows of `row_length` positions, each document into exactly one row: best-fit
    decreasing (Johnson 1973) within windows of the order.

    `lengths` int [n] are the positions that each document takes, between 1 and `row_length`. Documents of a row keep
    their order, and rows are ordered by their longest documents, so that a shuffled order gives shuffled rows. With
    `patches` int [n] the pictures of a row have `max_patches` patches at most.
    """
    order, small = np.asarray(order), index_type(len(order))
    row_of = np.empty(len(order), small)  # indexed by position in the order
    rows, openers = 0, list[np.ndarray]()
    for start in range(0, len(order), window):
        sizes = np.asarray(lengths[order[start : start + window]], np.int64)
        if patches is None:
            window_rows, window_openers = _best_fit_decreasing(sizes, row_length)
        else:
            window_patches = patches[order[start : start + window]]
            window_rows, window_openers = best_fit_of_two(sizes, row_length, window_patches, max_patches)
        row_of[start : start + window] = window_rows + rows
        openers.append(start + np.asarray(window_openers, small))
        rows += len(window_openers)
    rank = np.empty(rows, small)
    # By the longest document: by the first one, rows of many short documents would come early in every epoch.
    rank[np.argsort(np.concatenate([np.empty(0, small), *openers]), kind="stable")] = np.arange(rows, dtype=small)
    row_of = rank[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return PackedRows(order[np.argsort(row_of, kind="stable")], starts)


def unpacked_rows(order: np.ndarray) -> PackedRows:
    """One document per row."""
    return PackedRows(order, np.arange(len(order) + 1, dtype=np.int64))


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


def most_that_fit(lengths: np.ndarray, room: int) -> int:
    """How many of the shortest lengths fit into `room`."""
    fitting = 0
    for length, count in enumerate(np.bincount(lengths).tolist()):
        used = count if length == 0 else min(count, room // length)
        fitting, room = fitting + used, room - used * length
        if used < count:
            break
    return fitting
