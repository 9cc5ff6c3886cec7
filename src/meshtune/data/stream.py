"""Plain text tokenised during training: nothing is read, checked or cached beforehand, however large the files are.

Documents follow each other in a seeded order and fill every position of every row. A document that does not fit is
continued in the next row, as a segment of its own that begins with the previous token, so that every token but a
document's first is predicted exactly once. The position at which an update begins is a function of the data, the order
and the row length; a journal records it regularly, so that a resumed run need not read the data before it again.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshtune.data.conversation import Conversation, Origin, Text
from meshtune.data.documents import DocumentList
from meshtune.data.loader import TOKEN_ARRAYS, HostBatch, micro_batches
from meshtune.data.packing import shuffled
from meshtune.data.tokens import Example, Tokenize
from meshtune.errors import UserError

JOURNAL_INTERVAL = 16  # updates between two entries of the journal
_GROUP = 64  # documents tokenised at once


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """A position in the stream: the epoch, the index of the document in the epoch's order, and how many of its
    positions are used."""

    epoch: int = 0
    index: int = 0
    used: int = 0


class Stream:
    """Batches like those of data.loader.Loader, for a run of `steps` updates. `journal` is a file, or None.

    With `skip` records that cannot be read are left out, instead of raising UserError with the record's name.
    """

    units = None

    def __init__(
        self,
        documents: DocumentList,
        tokenize: Tokenize,
        *,
        max_length: int,
        batch_size: int,
        steps: int,
        accumulation: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        skip: bool = False,
        fingerprint: str = "",
        journal: pathlib.Path | None = None,
    ):
        self.documents, self.tokenize, self.steps = documents, tokenize, steps
        self.row_length, self.batch_size, self.accumulation = max_length, batch_size, accumulation
        self.shuffle, self.seed, self.skip = shuffle, seed, skip
        self.fingerprint, self.journal = fingerprint, journal

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
        cursor = _DocumentCursor(self, position)
        while True:
            if write_journal and step % JOURNAL_INTERVAL == 0:
                self._append_entry(step, cursor.position)
            batch = self._fill(cursor, step)
            if step >= first_step:
                yield batch
            step += 1

    def _fill(self, cursor: _DocumentCursor, step: int) -> HostBatch:
        shape = (self.batch_size, self.row_length)
        arrays = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_ARRAYS.items()}
        origins: list[list[Origin]] = []
        for row in range(self.batch_size):
            filled, row_origins = 0, list[Origin]()
            while filled < self.row_length:
                example, used = cursor.current()
                count = min(len(example.ids) - 1 - used, self.row_length - filled)
                span, targets = slice(filled, filled + count), slice(used + 1, used + 1 + count)
                row_origins.append(example.origin)
                arrays["tokens"][row, span] = example.ids[used : used + count]
                arrays["targets"][row, span] = example.ids[targets]
                arrays["weights"][row, span] = example.weights[targets]
                arrays["positions"][row, span] = np.arange(count)
                arrays["segment_ids"][row, span] = len(row_origins)
                filled += count
                cursor.advance(count)
            origins.append(row_origins)
        return micro_batches(arrays, origins, self.accumulation, step, cursor.position.epoch)

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


def _entry_checksum(entry: dict) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode())


def _parse_entry(line: bytes) -> dict | None:
    """An entry of the journal; None if it is incomplete, because its run was killed, or does not match its checksum."""
    try:
        entry = json.loads(line)
        return entry if entry.pop("crc32") == _entry_checksum(entry) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class _DocumentCursor:
    """A cursor over tokenised documents, epoch after epoch."""

    def __init__(self, stream: Stream, position: StreamPosition):
        self.stream, self.position = stream, position
        self._group: list[Example | None] = []
        self._group_start = 0  # the index of the group's first document
        self._order = self._epoch_order(position.epoch)

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
        count = len(self.stream.documents)
        return shuffled(count, self.stream.seed, epoch) if self.stream.shuffle else np.arange(count)

    def _read_group(self) -> None:
        self._group_start = self.position.index
        documents: list[Conversation | Text | None] = []
        for index in self._order[self._group_start : self._group_start + _GROUP]:
            try:
                document = self.stream.documents[int(index)]
            except UserError:
                if not self.stream.skip:
                    raise
                document = None
            assert document is None or isinstance(document, Conversation | Text)
            documents.append(document)
        examples = self.stream.tokenize.aligned(document for document in documents if document is not None)
        self._group = [None if document is None else next(examples) for document in documents]
