"""Batches as a pure function of (seed, step), so that a resumed run sees the batches it would have seen.

Steps are numbered across epochs, and every document is in every epoch exactly once. If the rows of an epoch do not fill
its last batch, padding rows (segment 0, weight 0) are added: no document is left out, shapes never change, and since
losses are sums over weights, padding does not affect them.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from meshtune.arrays.batch import TOKEN_ARRAYS, empty_arrays
from meshtune.data.conversation import Origin
from meshtune.data.packing import PackedRows, pack, padded_length, shuffle_order, unpacked_rows
from meshtune.data.store import Store
from meshtune.data.tokens import Example
from meshtune.data.units import Units
from meshtune.errors import UserError


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """The rows of one update, as NumPy arrays.

    `arrays` are those of arrays.batch.TOKEN_ARRAYS, each [A, B, T] (micro-batches, rows, positions), and with units
    those of units.Units.arrays. `origins[a][b]` lists the records of a row, segment 1 first, one for each unit; it is
    empty for a padding row.
    """

    arrays: dict[str, np.ndarray]
    origins: list[list[list[Origin]]]
    step: int
    epoch: int


class Loader:
    """Batches of `batch_size` rows in `accumulation` micro-batches, from a store.

    With `units` neighbouring documents of the store are a unit: they are neighbouring segments of one row, which has
    room for as many documents of `max_length`. `max_units` bounds the units (or documents) in any row.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_length: int,
        batch_size: int,
        accumulation: int = 1,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        units: Units | None = None,
    ):
        if not len(store) or batch_size % accumulation:
            raise _rows_error(store, batch_size, accumulation)
        self.store, self.packing, self.shuffle, self.seed = store, packing, shuffle, seed
        self.batch_size, self.accumulation = batch_size, accumulation
        self.units, self.unit_size = units, 1 if units is None else units.segments
        positions = store.lengths - 1  # the last token is only a target
        self._lengths = positions.reshape(-1, self.unit_size).sum(1)
        longest, max_length = int(self._lengths.max()), max_length * self.unit_size
        assert 1 <= self._lengths.min() <= longest <= max_length, f"{longest} positions, rows have {max_length}"
        self.row_length = max_length if packing else padded_length(longest, max_length)
        shortest_first = np.cumsum(np.sort(self._lengths))
        self.max_units = int(np.searchsorted(shortest_first, self.row_length, "right")) if packing else 1
        self._ends: list[int] = []  # the step after the last one of each epoch that was planned
        self._plans: collections.OrderedDict[int, PackedRows] = collections.OrderedDict()
        self._lock = threading.RLock()

    def rows(self, epoch: int) -> PackedRows:
        """The units, or documents, in each row of an epoch."""
        with self._lock:
            if epoch not in self._plans:
                n = len(self._lengths)
                order = shuffle_order(n, self.seed, epoch) if self.shuffle else np.arange(n)
                self._plans[epoch] = (
                    pack(self._lengths, order, self.row_length) if self.packing else unpacked_rows(order)
                )
                while len(self._plans) > 2:  # at the end of an epoch, threads still read the previous one
                    self._plans.popitem(last=False)
            self._plans.move_to_end(epoch)
            return self._plans[epoch]

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of updates in an epoch, which varies a little with packing."""
        with self._lock:
            while len(self._ends) <= epoch:
                if self._ends and not (self.packing and self.shuffle):
                    steps = self._ends[0]
                else:
                    steps = -(-len(self.rows(len(self._ends))) // self.batch_size)
                self._ends.append((self._ends[-1] if self._ends else 0) + steps)
            return self._ends[epoch] - (self._ends[epoch - 1] if epoch else 0)

    def total_steps(self, epochs: float) -> int:
        """The number of updates in `epochs` epochs, where a fraction of an epoch is rounded up."""
        complete = math.floor(epochs)
        fraction = epochs - complete
        steps = sum(self.steps_per_epoch(epoch) for epoch in range(complete))
        if fraction > 1e-9:
            steps += math.ceil(fraction * self.steps_per_epoch(complete) - 1e-6)
        return steps

    def epoch_position(self, step: int) -> tuple[int, int]:
        """The epoch of a step and the step's index in that epoch, both from 0."""
        with self._lock:
            while not self._ends or self._ends[-1] <= step:
                self.steps_per_epoch(len(self._ends))
            epoch = bisect.bisect_right(self._ends, step)
            return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def batch(self, step: int) -> HostBatch:
        """The batch of update `step`, counted from 0 over any number of epochs."""
        epoch, epoch_step = self.epoch_position(step)
        rows = self.rows(epoch)
        planned = epoch_step * self.batch_size + np.arange(self.batch_size)
        row_units = [rows[row] if row < len(rows) else rows.documents[:0] for row in planned.tolist()]
        documents = ((self.unit_size * units[:, None] + np.arange(self.unit_size)).ravel() for units in row_units)
        row_examples = [[self.store[index] for index in row.tolist()] for row in documents]
        return packed_batch(
            row_examples,
            row_units,
            row_sizes(self.batch_size, self.row_length, self.max_units, self.unit_size),
            step,
            epoch,
            accumulation=self.accumulation,
            units=self.units,
        )

    def iterate(
        self, start: int = 0, stop: int | None = None, *, threads: int = 2, prefetch: int = 4
    ) -> Iterator[HostBatch]:
        """Batches from `start` up to, not including, `stop` (None: without end). Threads prepare `prefetch` ahead.

        They are threads rather than processes, since a fork of a process that runs JAX can deadlock.
        """
        import grain

        dataset = grain.MapDataset.source(_BatchSource(self, start, sys.maxsize // 2 if stop is None else stop))
        iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)))
        try:
            yield from iterator
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


def _rows_error(store: Store, batch_size: int, accumulation: int) -> UserError:
    if not len(store):
        fix = "check roles and message weights"
        return UserError("the data contain nothing to train on", where="data.train", fix=fix)
    problem = f"batch_size {batch_size} cannot be divided into {accumulation} micro-batches"
    return UserError(problem, where="train.batch_size", fix=f"use a multiple of {accumulation}")


def row_sizes(rows: int, row_length: int, max_units: int = 1, unit_size: int = 1) -> dict[str, int]:
    """The sizes of the logical axes of a batch's arrays (see arrays.batch)."""
    return {"batch": rows, "length": row_length, "units": max_units, "segments": max_units * unit_size}


def packed_batch(
    rows: Sequence[Sequence[Example]],
    row_units: Sequence[np.ndarray],
    sizes: Mapping[str, int],
    step: int,
    epoch: int,
    *,
    accumulation: int,
    units: Units | None = None,
) -> HostBatch:
    """The batch of an update, in `accumulation` micro-batches. The examples of a row become its segments 1, 2, ...

    `sizes` are those of the logical axes of its arrays, `row_units` the indices of each row's units in the data.
    """
    size, count = 1 if units is None else units.segments, sizes["batch"] // accumulation
    arrays = empty_arrays(TOKEN_ARRAYS, sizes)
    for row, examples in enumerate(rows):
        _fill_row({name: array[row] for name, array in arrays.items()}, examples)
    origins = [[example.origin for example in examples[::size]] for examples in rows]
    if units is not None:
        values = [[example.value for example in examples[::size]] for examples in rows]
        arrays |= units.arrays(values, row_units, sizes, arrays)
    return HostBatch(
        {name: array.reshape(accumulation, count, *array.shape[1:]) for name, array in arrays.items()},
        [origins[start : start + count] for start in range(0, len(origins), count)],
        step,
        epoch,
    )


def _fill_row(row: dict[str, np.ndarray], examples: Iterable[Example]) -> None:
    position = 0
    for segment, example in enumerate(examples, start=1):
        length = len(example.ids) - 1
        span = slice(position, position := position + length)
        row["tokens"][span] = example.ids[:-1]
        row["targets"][span] = example.ids[1:]
        row["weights"][span] = example.weights[1:]
        row["positions"][span] = np.arange(length)
        row["segment_ids"][span] = segment


@dataclasses.dataclass(frozen=True)
class _BatchSource:
    """A loader as a random-access data source of grain."""

    loader: Loader
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __getitem__(self, index: int) -> HostBatch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.loader.batch(self.start + int(index))
