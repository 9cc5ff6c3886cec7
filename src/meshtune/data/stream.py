"""Plain text tokenised while it is trained on: nothing is read, checked or kept beforehand, however large the files.

Documents follow each other in a seeded order and fill rows to the last position: one that does not fit goes on in the
next row, as a segment of its own whose first token is the last one before, so that every token but a document's first
is predicted exactly once. Where each update begins is a function of the data, the order and the row length; a journal
notes it now and then, so that a run goes on inside the stream without reading what it has read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.documents import DocumentList
from meshtune.data.loader import TOKEN_ARRAYS, HostBatch
from meshtune.data.packing import shuffled
from meshtune.data.tokens import Example, Tokenize
from meshtune.errors import UserError

EVERY = 16  # updates between two notes in the journal
_GROUP = 64  # documents tokenised at once


@dataclasses.dataclass(frozen=True)
class Spot:
    """A place in the stream: the epoch, the document by its place in the epoch's order, and its positions used."""

    epoch: int = 0
    place: int = 0
    used: int = 0


class Stream:
    """Batches as data.loader.Loader gives them, for a run of `steps` updates. `journal` is a file, or None.

    `skip` leaves out records that cannot be read instead of raising UserError, which names the record.
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
        """The whole run's: how long an epoch is, is known at its end."""
        return self.steps

    def total_steps(self, epochs: float) -> int:
        raise UserError(
            "how many updates an epoch of a stream has is known only at its end", where="train", fix="give train.steps"
        )

    def epoch_position(self, step: int) -> tuple[int, int]:
        """As if the run were one epoch."""
        return divmod(step, self.steps)

    def batch(self, step: int) -> HostBatch:
        """The batch of update `step`, counting from 0."""
        return next(self._from(step))

    def iterate(self, start: int = 0, stop: int | None = None, *, ahead: int = 4) -> Iterator[HostBatch]:
        """Batches start, start + 1, ... to before `stop`, prepared `ahead` by a thread."""
        batches = self._from(start, note=True)
        left = itertools.count() if stop is None else iter(range(stop - start))
        with ThreadPoolExecutor(1, "stream") as thread:
            pending: collections.deque[Future[HostBatch]] = collections.deque()

            def order() -> None:
                if next(left, None) is not None:
                    pending.append(thread.submit(next, batches))

            for _ in range(ahead):
                order()
            try:
                while pending:
                    batch = pending.popleft().result()
                    order()
                    yield batch
            finally:
                for waiting in pending:
                    waiting.cancel()

    def _from(self, step: int, *, note: bool = False) -> Iterator[HostBatch]:
        number, spot = self._known(step)
        stream = _Documents(self, spot)
        while True:
            if note and number % EVERY == 0:
                self._note(number, stream.spot)
            batch = self._filled(stream, number)
            if number >= step:
                yield batch
            number += 1

    def _filled(self, stream: _Documents, step: int) -> HostBatch:
        shape = (self.batch_size, self.row_length)
        arrays = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_ARRAYS.items()}
        origins: list[list[Origin]] = []
        for row in range(self.batch_size):
            at, held = 0, list[Origin]()
            while at < self.row_length:
                example, used = stream.current()
                count = min(len(example.ids) - 1 - used, self.row_length - at)
                here, there = slice(at, at + count), slice(used + 1, used + 1 + count)
                held.append(example.origin)
                arrays["tokens"][row, here] = example.ids[used : used + count]
                arrays["targets"][row, here] = example.ids[there]
                arrays["weights"][row, here] = example.weights[there]
                arrays["positions"][row, here] = np.arange(count)
                arrays["segment_ids"][row, here] = len(held)
                at += count
                stream.advance(count)
            origins.append(held)
        each = self.batch_size // self.accumulation
        return HostBatch(
            {name: array.reshape(self.accumulation, each, self.row_length) for name, array in arrays.items()},
            [origins[start : start + each] for start in range(0, self.batch_size, each)],
            step,
            stream.spot.epoch,
        )

    def _known(self, step: int) -> tuple[int, Spot]:
        """The latest update at or before `step` whose beginning was noted."""
        best = (0, Spot())
        if self.journal is None or not self.journal.is_file():
            return best
        for line in self.journal.read_text(encoding="utf-8").splitlines():
            try:
                noted = json.loads(line)
                found = (int(noted["step"]), Spot(*map(int, noted["spot"])))
            except (ValueError, KeyError, TypeError):
                continue  # half a line, of a run that was killed while it wrote
            if noted.get("data") == self.fingerprint and best[0] <= found[0] <= step:
                best = found
        return best

    def _note(self, step: int, spot: Spot) -> None:
        if self.journal is not None:
            noted = {"step": step, "spot": dataclasses.astuple(spot), "data": self.fingerprint}
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(noted) + "\n")


class _Documents:
    """Tokenised documents one after the other, epoch after epoch, from a place on."""

    def __init__(self, stream: Stream, spot: Spot):
        self.stream, self.spot = stream, spot
        self._group: list[Example | None] = []
        self._first = 0  # the place of the group's first document
        self._order = self._of(spot.epoch)

    def current(self) -> tuple[Example, int]:
        """The document that is being read, and how many of its positions are used."""
        empty = 0
        while True:
            if self.spot.place >= len(self._order):
                self.spot = Spot(self.spot.epoch + 1)
                self._order, self._group = self._of(self.spot.epoch), []
            inside = self.spot.place - self._first
            if not 0 <= inside < len(self._group):
                self._read()
                inside = 0
            example = self._group[inside]
            if example is not None and len(example.ids) > 1:
                return example, self.spot.used
            empty += 1
            if empty > len(self._order):
                raise UserError("there is nothing to learn anywhere in the data", where="data.train")
            self.spot = Spot(self.spot.epoch, self.spot.place + 1)

    def advance(self, count: int) -> None:
        """Uses `count` positions of the current document."""
        example, used = self.current()
        done = used + count == len(example.ids) - 1
        self.spot = (
            Spot(self.spot.epoch, self.spot.place + 1) if done else dataclasses.replace(self.spot, used=used + count)
        )

    def _of(self, epoch: int) -> np.ndarray:
        count = len(self.stream.documents)
        return shuffled(count, self.stream.seed, epoch) if self.stream.shuffle else np.arange(count)

    def _read(self) -> None:
        self._first = self.spot.place
        found = []
        for index in self._order[self._first : self._first + _GROUP]:
            try:
                found.append(self.stream.documents[int(index)])
            except UserError:
                if not self.stream.skip:
                    raise
                found.append(None)
        made = iter(self.stream.tokenize.each(one for one in found if one is not None))
        self._group = [None if one is None else next(made) for one in found]
