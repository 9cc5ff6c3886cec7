"""Batches as a pure function of (seed, step): a run that is killed and resumed sees what it would have seen.

Epochs follow each other without a gap in the numbering of steps. Every document is in every epoch exactly once. An
epoch whose rows do not fill its last batch is filled up with rows of padding (segment 0, weight 0): nothing is left
out, shapes never change, and since losses are sums over weights the padding changes no number.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import sys
import threading
from collections.abc import Iterator

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.packing import PackedRows, one_a_row, pack, padded_length, shuffled
from meshtune.data.store import Store
from meshtune.data.units import Units
from meshtune.errors import UserError

TOKEN_ARRAYS = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "weights": np.float32,
}


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """One update's rows.

    `arrays`: tokens, targets, positions, segment_ids int32 and weights float32, each [A, B, T] (micro-batches, rows,
    positions), and what data.units says for documents that belong together. `origins[a][b]` lists the records in a
    row, segment 1 first; empty for a row of padding.
    """

    arrays: dict[str, np.ndarray]
    origins: list[list[list[Origin]]]
    step: int
    epoch: int


class Loader:
    """Batches of `batch_size` rows in `accumulation` micro-batches, from a store.

    With `units` every two neighbours of the store belong together: they share a row, which has room for two documents
    of `max_length`, as neighbouring segments. `most` is the largest number of units (or documents) in any row.
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
        if not len(store):
            raise UserError("there is nothing to learn anywhere in the data", where="data.train")
        if batch_size % accumulation:
            raise UserError(
                f"batch_size {batch_size} does not divide into {accumulation} micro-batches", where="train.batch_size"
            )
        self.store, self.packing, self.shuffle, self.seed = store, packing, shuffle, seed
        self.batch_size, self.accumulation = batch_size, accumulation
        self.units, self.together = units, 1 if units is None else 2
        each = store.lengths - 1  # positions: the last token is only a target
        self._lengths = each.reshape(-1, self.together).sum(1)  # those that belong together share a row
        longest, max_length = int(self._lengths.max()), max_length * self.together
        if longest > max_length or self._lengths.min() < 1:
            raise ValueError(f"documents take {self._lengths.min()} to {longest} positions, rows have {max_length}")
        self.row_length = max_length if packing else padded_length(longest, max_length)
        self.most = int(np.searchsorted(np.cumsum(np.sort(self._lengths)), self.row_length, "right")) if packing else 1
        self._ends: list[int] = []  # the step after the last one of each epoch that was planned
        self._plans: collections.OrderedDict[int, PackedRows] = collections.OrderedDict()
        self._lock = threading.RLock()

    def rows(self, epoch: int) -> PackedRows:
        """Which documents lie in which row of an epoch."""
        with self._lock:
            if epoch not in self._plans:
                n = len(self._lengths)
                order = shuffled(n, self.seed, epoch) if self.shuffle else np.arange(n)
                self._plans[epoch] = pack(self._lengths, order, self.row_length) if self.packing else one_a_row(order)
                while len(self._plans) > 2:  # at the turn of an epoch, threads still read the last one
                    self._plans.popitem(last=False)
            self._plans.move_to_end(epoch)
            return self._plans[epoch]

    def steps_per_epoch(self, epoch: int) -> int:
        """Updates in an epoch: packing makes it differ a little between epochs."""
        with self._lock:
            while len(self._ends) <= epoch:
                if self._ends and not (self.packing and self.shuffle):
                    steps = self._ends[0]
                else:
                    steps = -(-len(self.rows(len(self._ends))) // self.batch_size)
                self._ends.append((self._ends[-1] if self._ends else 0) + steps)
            return self._ends[epoch] - (self._ends[epoch - 1] if epoch else 0)

    def total_steps(self, epochs: float) -> int:
        """Updates in so many epochs; a part of an epoch is rounded up to whole updates."""
        whole = math.floor(epochs)
        part = epochs - whole
        steps = sum(self.steps_per_epoch(epoch) for epoch in range(whole))
        if part > 1e-9:
            steps += math.ceil(part * self.steps_per_epoch(whole) - 1e-6)
        return steps

    def epoch_position(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the step's number in it; both count from 0."""
        with self._lock:
            while not self._ends or self._ends[-1] <= step:
                self.steps_per_epoch(len(self._ends))
            epoch = bisect.bisect_right(self._ends, step)
            return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def batch(self, step: int) -> HostBatch:
        """The batch of update `step`, counting from 0; beyond the last epoch it goes on with the next."""
        epoch, within = self.epoch_position(step)
        rows = self.rows(epoch)
        shape = (self.batch_size, self.row_length)
        arrays = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_ARRAYS.items()}
        origins: list[list[Origin]] = []
        members: list[np.ndarray] = []
        for place in range(self.batch_size):
            row = within * self.batch_size + place
            held = rows[row] if row < len(rows) else rows.documents[:0]
            documents = (self.together * held[:, None] + np.arange(self.together)).ravel().tolist()
            self._fill({name: array[place] for name, array in arrays.items()}, documents)
            origins.append([self.store.origin(document) for document in documents[:: self.together]])
            members.append(held)
        if self.units is not None:
            arrays |= self.units.arrays(self.store, members, self.most, arrays)
        each = self.batch_size // self.accumulation
        return HostBatch(
            {name: array.reshape(self.accumulation, each, array.shape[-1]) for name, array in arrays.items()},
            [origins[start : start + each] for start in range(0, self.batch_size, each)],
            step,
            epoch,
        )

    def _fill(self, row: dict[str, np.ndarray], documents: list[int]) -> None:
        store, at = self.store, 0
        for segment, document in enumerate(documents, start=1):
            start, end = int(store.offsets[document]), int(store.offsets[document + 1])
            here = slice(at, at := at + end - start - 1)
            row["tokens"][here] = store.ids[start : end - 1]
            row["targets"][here] = store.ids[start + 1 : end]
            row["weights"][here] = store.weights[start + 1 : end]
            row["positions"][here] = np.arange(end - start - 1)
            row["segment_ids"][here] = segment

    def iterate(
        self, start: int = 0, stop: int | None = None, *, threads: int = 2, ahead: int = 4
    ) -> Iterator[HostBatch]:
        """Batches start, start + 1, ... to before `stop` (None: without end), prepared `ahead` by threads.

        Threads, never forks: a fork of a process that runs JAX can deadlock.
        """
        import grain

        dataset = grain.MapDataset.source(_BatchSource(self, start, sys.maxsize // 2 if stop is None else stop))
        iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)))
        try:
            yield from iterator
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


@dataclasses.dataclass(frozen=True)
class _BatchSource:
    """A loader as grain sees it: a source with random access."""

    loader: Loader
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __getitem__(self, index: int) -> HostBatch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.loader.batch(self.start + int(index))
