"""Batches of data that are tokenised during training: nothing is checked or cached beforehand, however large the files
are.

The contents of a batch's rows are a function of the data, their order and the position at which the update begins
(data.text_rows, data.window_rows), so that every process of a job computes the same batches. A journal records that
position regularly, so that a resumed run need not read the data before it again.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from meshtune.data.conversation import Sample
from meshtune.data.loader import HostBatch
from meshtune.data.tokens import Example
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
