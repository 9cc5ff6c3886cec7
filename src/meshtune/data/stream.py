"""Batches of data that are tokenised during training: nothing is checked or cached beforehand, however large the files
are.

The contents of a batch's rows are a function of the data, their order and the position at which the update begins
(data.text_rows, data.window_rows), so that every process of a job computes the same batches. A journal records that
position regularly, so that a resumed run need not read the data before it again.

Documents follow each other in a seeded order and fill every position of every row. A document that does not fit is
continued in the next row, as a separate segment that begins with the previous token, so that every token but a
document's first is predicted exactly once.

The samples of an epoch are in a seeded order; WINDOW neighbours at a time are tokenised and packed into rows,
so that every sample is in every epoch exactly once. The contents of a window depend only on its samples: a resumed run
tokenises the window that it stopped in again and continues at the row.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from meshtune.data.conversation import Conversation, Sample, Text
from meshtune.data.documents import DocumentList
from meshtune.data.loader import (
    HostBatch,
    PackedRows,
    Units,
    pack,
    packed_batch,
    row_sizes,
    shuffle_order,
    unpacked_rows,
)
from meshtune.data.tokens import Example, TokenCounts, Tokenize
from meshtune.errors import UserError

JOURNAL_INTERVAL = 16  # updates between two entries of the journal


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """A position in the stream: the epoch, the index of the document or window in the epoch's order, and how many of
    its positions or rows are used."""

    epoch: int = 0
    index: int = 0
    used: int = 0


class Cursor(Protocol):
    """Reads batches from a position on. `position` is where the next one begins."""

    position: StreamPosition

    def batch(self, step: int) -> HostBatch: ...


class StreamRows(Protocol):
    """The rows of a stream, epoch after epoch: `batch_size` of them are an update, each of `row_length` positions."""

    @property
    def documents(self) -> Sequence[Sample]: ...

    @property
    def row_length(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    def cursor(self, position: StreamPosition) -> Cursor: ...

    def first_examples(self, count: int) -> Sequence[Example]: ...


class Stream:
    """Batches like those of data.loader.Loader, for a run of `steps` updates. `journal` is a file, or None.

    `fingerprint` is a hash of what the batches depend on: entries of the journal with another one are ignored.
    """

    def __init__(self, rows: StreamRows, *, steps: int, fingerprint: str = "", journal: pathlib.Path | None = None):
        self.rows, self.steps, self.fingerprint, self.journal = rows, steps, fingerprint, journal
        self.documents, self.row_length, self.batch_size = rows.documents, rows.row_length, rows.batch_size

    def steps_per_epoch(self, epoch: int) -> int:
        """The updates of the whole run, since the length of an epoch is unknown before its end."""
        return self.steps

    def total_steps(self, epochs: float) -> int:
        raise UserError(
            "the number of updates in an epoch of a stream is unknown before its end",
            where="train",
            fix="give train.steps",
        )

    def epoch_position(self, step: int) -> tuple[int, int]:
        """The position of a step as if the run were one epoch."""
        return divmod(step, self.steps)

    def batch(self, step: int) -> HostBatch:
        """The batch of update `step`, counted from 0."""
        return next(self._batches(step))

    def iterate(self, start: int = 0, stop: int | None = None, *, prefetch: int = 4) -> Iterator[HostBatch]:
        """Batches from `start` up to, not including, `stop`. A thread prepares `prefetch` ahead."""
        batches = self._batches(start, write_journal=True)
        remaining = itertools.count() if stop is None else iter(range(stop - start))
        with ThreadPoolExecutor(1, "stream") as thread:
            pending: collections.deque[Future[HostBatch]] = collections.deque()

            def submit() -> None:
                if next(remaining, None) is not None:
                    pending.append(thread.submit(next, batches))

            for _ in range(prefetch):
                submit()
            try:
                while pending:
                    batch = pending.popleft().result()
                    submit()
                    yield batch
            finally:
                for future in pending:
                    future.cancel()

    def _batches(self, first_step: int, *, write_journal: bool = False) -> Iterator[HostBatch]:
        step, position = self._latest_entry(first_step)
        cursor = self.rows.cursor(position)
        while True:
            if write_journal and step % JOURNAL_INTERVAL == 0:
                self._append_entry(step, cursor.position)
            batch = cursor.batch(step)
            if step >= first_step:
                yield batch
            step += 1

    def _latest_entry(self, step: int) -> tuple[int, StreamPosition]:
        """The last step at or before `step` that the journal has, with its position; the start if there is none.

        Entries that are incomplete or damaged are ignored: the data after an earlier entry are read again.
        """
        latest = (0, StreamPosition())
        if self.journal is None or not self.journal.is_file():
            return latest
        for line in self.journal.read_bytes().splitlines():
            entry = _parse_entry(line)
            if entry is None or entry["data"] != self.fingerprint:
                continue
            if latest[0] <= entry["step"] <= step:
                latest = (entry["step"], StreamPosition(*entry["spot"]))
        return latest

    def _append_entry(self, step: int, position: StreamPosition) -> None:
        if self.journal is not None:
            entry = {"step": step, "spot": dataclasses.astuple(position), "data": self.fingerprint}
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**entry, "crc32": _entry_checksum(entry)}) + "\n")


def unreadable(error: UserError) -> UserError:
    """The error of a record of a stream, with what to do about it once the run has begun."""
    remedy = "resume=true goes on from the last checkpoint, with data.on_bad=skip without such records"
    return UserError(error.what, where=error.where, fix=f"{error.fix}; {remedy}" if error.fix else remedy)


def _entry_checksum(entry: dict) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode())


def _parse_entry(line: bytes) -> dict | None:
    """An entry of the journal; None if it is incomplete, because its run was killed, or does not match its checksum."""
    try:
        entry = json.loads(line)
        return entry if entry.pop("crc32") == _entry_checksum(entry) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


_GROUP = 64  # documents tokenised at once


@dataclasses.dataclass(frozen=True)
class TextRows:
    """Rows of `row_length` positions, `batch_size` of them an update of `accumulation` micro-batches.

    With `skip` records that cannot be read are left out, instead of raising UserError with the record's name.
    """

    documents: DocumentList
    tokenize: Tokenize
    row_length: int
    batch_size: int
    accumulation: int
    shuffle: bool
    seed: int
    skip: bool

    def cursor(self, position: StreamPosition) -> DocumentCursor:
        """A cursor whose next batch begins at `position`."""
        return DocumentCursor(self, position)

    def first_examples(self, count: int) -> Sequence[Example]:
        """The first `count` documents of the first epoch, for a look at the data."""
        cursor, examples = self.cursor(StreamPosition()), list[Example]()
        for _ in range(min(count, len(self.documents))):
            example, _ = cursor.current()
            if cursor.position.epoch > 0:
                break
            examples.append(example)
            cursor.advance(len(example.ids) - 1)
        return examples


class DocumentCursor:
    """A cursor over tokenised documents, epoch after epoch."""

    def __init__(self, rows: TextRows, position: StreamPosition):
        self.rows, self.position = rows, position
        self._group: list[Example | None] = []
        self._group_start = 0  # the index of the group's first document
        self._order = self._epoch_order(position.epoch)

    def batch(self, step: int) -> HostBatch:
        """The next batch, as update `step`."""
        rows, row_examples = self.rows, list[list[Example]]()
        for _ in range(rows.batch_size):
            room, examples = rows.row_length, list[Example]()
            while room:
                example, used = self.current()
                count = min(len(example.ids) - 1 - used, room)
                span = slice(used, used + count + 1)
                examples.append(dataclasses.replace(example, ids=example.ids[span], weights=example.weights[span]))
                room -= count
                self.advance(count)
            row_examples.append(examples)
        sizes = row_sizes(rows.batch_size, rows.row_length)
        return packed_batch(row_examples, [], sizes, step, self.position.epoch, accumulation=rows.accumulation)

    def current(self) -> tuple[Example, int]:
        """The document at the cursor, and how many of its positions are used."""
        empty = 0
        while True:
            if self.position.index >= len(self._order):
                self.position = StreamPosition(self.position.epoch + 1)
                self._order, self._group = self._epoch_order(self.position.epoch), []
            offset = self.position.index - self._group_start
            if not 0 <= offset < len(self._group):
                self._read_group()
                offset = 0
            example = self._group[offset]
            if example is not None and len(example.ids) > 1:
                return example, self.position.used
            empty += 1
            if empty > len(self._order):
                raise UserError(
                    "the data contain nothing to train on", where="data.train", fix="give records with text"
                )
            self.position = StreamPosition(self.position.epoch, self.position.index + 1)

    def advance(self, count: int) -> None:
        """Uses `count` positions of the current document."""
        example, used = self.current()
        if used + count == len(example.ids) - 1:
            self.position = StreamPosition(self.position.epoch, self.position.index + 1)
        else:
            self.position = dataclasses.replace(self.position, used=used + count)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        count = len(self.rows.documents)
        return shuffle_order(count, self.rows.seed, epoch) if self.rows.shuffle else np.arange(count)

    def _read_group(self) -> None:
        self._group_start = self.position.index
        documents: list[Conversation | Text | None] = []
        for index in self._order[self._group_start : self._group_start + _GROUP]:
            try:
                document = self.rows.documents[int(index)]
            except UserError as error:
                if not self.rows.skip:
                    raise unreadable(error) from None
                document = None
            assert document is None or isinstance(document, Conversation | Text)
            documents.append(document)
        examples = self.rows.tokenize.tokenise_each(document for document in documents if document is not None)
        self._group = [None if document is None else next(examples) for document in documents]


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
