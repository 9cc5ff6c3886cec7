"""The rows of a stream of samples that must not be divided: conversations, pairs, labelled answers.

The samples of an epoch are in a seeded order; WINDOW neighbours at a time are tokenised and packed into rows,
so that every sample is in every epoch exactly once. The contents of a window depend only on its samples: a resumed run
tokenises the window that it stopped in again and continues at the row.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from meshtune.data.conversation import Sample
from meshtune.data.loader import HostBatch, packed_batch, row_sizes
from meshtune.data.packing import PackedRows, pack, shuffle_order, unpacked_rows
from meshtune.data.stream import StreamPosition, unreadable
from meshtune.data.tokens import Example, TokenCounts, Tokenize
from meshtune.data.units import Units
from meshtune.errors import UserError

WINDOW = 1024  # samples that are tokenised together and may share a row
UNIT_POSITIONS = 32  # a unit of a packed row takes at least these, which bounds the units of a row
_RECENT = 2  # windows in memory

Examples = Callable[[Tokenize, Iterable[Sample]], Iterator[Example]]


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokenised samples and their rows. `rows` are indices of units of neighbouring examples, or of examples."""

    examples: Sequence[Example]
    rows: PackedRows
    counts: TokenCounts

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64."""
        return np.array([len(example.ids) for example in self.examples], np.int64)


class WindowRows:
    """Rows with room for one document of `max_length`, or for a unit of them; `batch_size` rows are an update.

    `examples` tokenises samples. Without `packing` every unit, or document, has its own row. With `skip` records
    that cannot be read are left out, instead of raising UserError with the record's name.
    """

    def __init__(
        self,
        documents: Sequence[Sample],
        tokenize: Tokenize,
        examples: Examples,
        *,
        max_length: int,
        batch_size: int,
        accumulation: int = 1,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        skip: bool = False,
        units: Units | None = None,
    ):
        self.documents, self.tokenize, self.examples = documents, tokenize, examples
        self.units, self.unit_size = units, 1 if units is None else units.segments
        self.row_length, self.packing = max_length * self.unit_size, packing
        self.batch_size, self.accumulation = batch_size, accumulation
        self.shuffle, self.seed, self.skip = shuffle, seed, skip
        self.max_units = max(1, self.row_length // UNIT_POSITIONS) if packing else 1
        self.window_size = WINDOW
        self.windows = -(-len(documents) // self.window_size)
        self._recent: collections.OrderedDict[tuple[int, int], Window] = collections.OrderedDict()
        self._orders: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def cursor(self, position: StreamPosition) -> WindowCursor:
        """A cursor whose next batch begins at `position`."""
        return WindowCursor(self, position)

    def first_examples(self, count: int) -> Sequence[Example]:
        """The first `count` examples of the first window that has any, for a look at the data."""
        windows = (self.window(0, index).examples for index in range(self.windows))
        return next((examples[:count] for examples in windows if examples), ())

    def window(self, epoch: int, index: int) -> Window:
        """The window at `index` of an epoch. Raises UserError, naming the record, as readers and templates do."""
        with self._lock:
            window = self._recent.get((epoch, index))
            if window is None:
                window = self._recent[epoch, index] = self._read(
                    self._order(epoch)[self.window_size * index :][: self.window_size]
                )
                while len(self._recent) > _RECENT:
                    self._recent.popitem(last=False)
            return window

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.documents))
        if epoch not in self._orders:
            self._orders = {epoch: shuffle_order(len(self.documents), self.seed, epoch)}
        return self._orders[epoch]

    def _read(self, chosen: np.ndarray) -> Window:
        self.tokenize.counts = counts = TokenCounts()
        examples = list(self.examples(self.tokenize, self._samples(chosen)))
        positions = np.array([len(example.ids) - 1 for example in examples], np.int64)
        lengths = positions.reshape(-1, self.unit_size).sum(1)
        order = np.arange(len(lengths))
        if self.units is not None:
            lengths = np.maximum(lengths, -(-self.row_length // self.max_units))
        rows = pack(lengths, order, self.row_length) if self.packing else unpacked_rows(order)
        return Window(examples, rows, counts)

    def _samples(self, chosen: np.ndarray) -> Iterator[Sample]:
        for index in chosen:
            try:
                sample = self.documents[int(index)]
            except UserError as error:
                if not self.skip:
                    raise unreadable(error) from None
            else:
                yield sample


class WindowCursor:
    """A cursor over the rows of windows, epoch after epoch."""

    def __init__(self, rows: WindowRows, position: StreamPosition):
        self.rows, self.position = rows, position

    def batch(self, step: int) -> HostBatch:
        """The next batch, as update `step`."""
        rows, row_examples = self.rows, list[Sequence[Example]]()
        row_units: list[np.ndarray] = []
        for _ in range(rows.batch_size):
            window, units = self._next_row()
            documents = (rows.unit_size * units[:, None] + np.arange(rows.unit_size)).ravel()
            row_examples.append([window.examples[document] for document in documents.tolist()])
            row_units.append(units)
        return packed_batch(
            row_examples,
            row_units,
            row_sizes(rows.batch_size, rows.row_length, rows.max_units, rows.unit_size),
            step,
            self.position.epoch,
            accumulation=rows.accumulation,
            units=rows.units,
        )

    def _next_row(self) -> tuple[Window, np.ndarray]:
        """The next row's window and its units, or documents, there."""
        empty = 0
        while True:
            if self.position.index >= self.rows.windows:
                self.position = StreamPosition(self.position.epoch + 1)
            epoch, index, row = dataclasses.astuple(self.position)
            window = self.rows.window(epoch, index)
            if row < len(window.rows):
                self.position = StreamPosition(epoch, index, row + 1)
                return window, window.rows[row]
            empty += not len(window.rows)
            if empty > self.rows.windows:
                raise UserError(
                    "the data contain nothing to train on",
                    where="data.train",
                    fix="raise data.max_length, or check roles and message weights",
                )
            self.position = StreamPosition(epoch, index + 1)
