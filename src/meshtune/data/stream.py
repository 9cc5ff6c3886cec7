"""Batches of data that are tokenised during training: nothing is checked or cached beforehand, however large the files
are.

The samples of an epoch are in a seeded order and are dealt in turn to lanes, one for each row of an update (fewer where
that would leave a lane less than LANE_SAMPLES). A lane fills its rows of all updates by itself, epoch after epoch, and
every sample is once in each of its epochs. So a row depends only on the data, their order and its place, and a
process reads and tokenises only the samples of those rows that it trains on.

The samples of a lane are tokenised in blocks, here or in worker processes. A journal records the positions of lanes
regularly, so that a resumed run need not read the data before them again.

Documents of plain text follow each other and fill every position of every row. A document that does not fit is
continued in the lane's next row, as a separate segment that begins with the previous token, so that every token but a
document's first is predicted exactly once. Other samples are packed: a lane tokenises some rows of them at a time, and
those of the emptiest row are packed again with the next ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import pickle
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, Protocol

import numpy as np

from meshtune.data.conversation import Sample
from meshtune.data.documents import DocumentList
from meshtune.data.loader import HostBatch, PartTask, StageExamples, Units, packed_batch, row_sizes, with_companions
from meshtune.data.packing import index_type, pack, shuffle_order, unpacked_rows
from meshtune.data.tokens import Example, TokenCounts, Tokenize
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction

task_pool = LazyFunction("meshtune.data.tasks:TaskPool")
JOURNAL_INTERVAL = 16  # updates between two entries of the journal
LANE_SAMPLES = 256  # samples of an epoch that a lane has at least, if there are several
BLOCK = 64  # samples tokenised at once
PACKED_ROWS = 16  # rows that are packed together, or more
UNIT_POSITIONS = 32  # a unit of a packed row takes at least these, which bounds the units of a row
_ORDERS = 1 << 22  # samples of orders in memory, or two of them
_AHEAD = 4  # blocks for each worker that are requested before they are used

BlockPlace = tuple[int, int, int]
"""A lane, an epoch and the number of a block there."""


def unreadable(error: UserError) -> UserError:
    """The error of a record of a stream, with what to do about it once the run has begun."""
    remedy = "resume=true goes on from the last checkpoint, with data.on_bad=skip without such records"
    return UserError(error.what, where=error.where, fix=f"{error.fix}; {remedy}" if error.fix else remedy)


@dataclasses.dataclass(frozen=True)
class TokenBlock:
    """Tokenised samples, with counts, and whether any was a conversation."""

    examples: list[Example]
    counts: TokenCounts
    conversation: bool


@dataclasses.dataclass(frozen=True)
class BlockTask:
    """Reads and tokenises samples. With `skip` records that cannot be read are left out."""

    samples: DocumentList
    convert: StageExamples
    skip: bool
    file: ClassVar[None] = None  # the result is not stored (see data.tasks.Task)

    def make(self, tokenize: Tokenize) -> TokenBlock:
        """Tokenises the samples. Raises UserError, naming the record, as readers and templates do."""
        tokenize.start_counts()
        examples = self.convert(tokenize, self._readable())
        if self.convert.dataset_type == "labelled":
            examples = with_companions(examples, tokenize.options.max_length)
        return TokenBlock(list(examples), tokenize.counts, tokenize.saw_conversation)

    def _readable(self) -> Iterator[Sample]:
        for index in range(len(self.samples)):
            try:
                sample = self.samples[index]
            except UserError as error:
                if not self.skip:
                    raise unreadable(error) from None
            else:
                yield sample


@dataclasses.dataclass(frozen=True, eq=False)
class StreamRows:
    """The rows of a stream: `batch_size` of them are an update, each of `row_length` positions.

    With `continued` documents fill rows and go on in the next; otherwise a row has room for one document of the longest
    length, or for a unit of them, and has as many as fit with `packing`, or else one. `task` tokenises samples.
    """

    documents: DocumentList
    task: PartTask
    row_length: int
    batch_size: int
    accumulation: int
    continued: bool
    packing: bool
    shuffle: bool
    seed: int
    skip: bool
    units: Units | None
    _orders: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    _tokenizers: list[Tokenize] = dataclasses.field(default_factory=list)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def lanes(self) -> int:
        """The most lanes that divide the rows of an update and have at least LANE_SAMPLES samples each."""
        fitting = (lanes for lanes in range(2, self.batch_size + 1) if self.batch_size % lanes == 0)
        return max((lanes for lanes in fitting if lanes * LANE_SAMPLES <= len(self.documents)), default=1)

    @property
    def unit_size(self) -> int:
        """The examples of a unit."""
        return 1 if self.units is None else self.units.segments

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the logical axes of a batch's arrays."""
        return row_sizes(self.batch_size, self.row_length, self.max_units, self.unit_size)

    @property
    def max_units(self) -> int:
        """The units that a row may have."""
        is_packed = self.packing and not self.continued
        return max(1, self.row_length // UNIT_POSITIONS) if is_packed else 1

    def order(self, epoch: int) -> np.ndarray:
        """The samples of an epoch in their order."""
        count = len(self.documents)
        if not self.shuffle:
            return np.arange(count, dtype=index_type(count))
        with self._lock:
            if epoch not in self._orders:
                while len(self._orders) >= max(2, _ORDERS // count):  # lanes may be in different epochs
                    del self._orders[min(self._orders)]
                order = shuffle_order(count, self.seed, epoch)
                self._orders[epoch] = self.documents.group_by_window(order, self.seed, epoch)
            return self._orders[epoch]

    def blocks(self, lane: int) -> int:
        """The blocks of a lane in every epoch."""
        return -(-len(range(lane, len(self.documents), self.lanes)) // BLOCK)

    def block_task(self, place: BlockPlace) -> BlockTask:
        """The task that tokenises a block. The blocks of a lane differ by a sample at most: an answer is compared with
        another one of its block."""
        lane, epoch, number = place
        dealt, blocks = self.order(epoch)[lane :: self.lanes], self.blocks(lane)
        return self._task(dealt[len(dealt) * number // blocks : len(dealt) * (number + 1) // blocks])

    def _task(self, numbers: np.ndarray) -> BlockTask:
        return BlockTask(self.documents.take(numbers).compact(), self.task.convert, self.skip)

    def tokenise(self, task: BlockTask) -> TokenBlock:
        """The result of a task. Raises UserError as it does."""
        with self._lock:
            if not self._tokenizers:
                self._tokenizers.append(self.task.tokenize())
            return task.make(self._tokenizers[0])

    def first_block(self, count: int) -> TokenBlock:
        """The first `count` samples of the first epoch."""
        return self.tokenise(self._task(self.order(0)[:count]))

    def first_examples(self, count: int) -> Sequence[Example]:
        """The first `count` examples of the first samples that give any, for a look at the data."""
        order, size = self.order(0), max(count, BLOCK)
        blocks = (self.tokenise(self._task(order[start : start + size])) for start in range(0, len(order), size))
        return next((block.examples[:count] for block in blocks if block.examples), ())

    def pack(self, examples: Sequence[Example]) -> list[np.ndarray]:
        """The units, or examples, of each row of `examples`."""
        positions = np.array([len(example.ids) - 1 for example in examples], np.int64)
        lengths = positions.reshape(-1, self.unit_size).sum(1)
        order = np.arange(len(lengths))
        if self.units is not None:
            lengths = np.maximum(lengths, -(-self.row_length // self.max_units))
        rows = pack(lengths, order, self.row_length) if self.packing else unpacked_rows(order)
        return [rows[row] for row in range(len(rows))]

    def lane(self, number: int, reader: BlockReader, position: LanePosition) -> Lane:
        """A lane whose next row begins at `position`."""
        return (ContinuedLane if self.continued else PackedLane)(self, reader, number, position)

    def batch(self, rows: Sequence[Sequence[Example]], step: int, epoch: int) -> HostBatch:
        """The batch of an update, of the examples of each row."""
        units = [np.arange(len(examples) // self.unit_size) for examples in rows]
        return packed_batch(rows, units, self.sizes, step, epoch, accumulation=self.accumulation, units=self.units)


class BlockReader:
    """Gives the blocks of some lanes: tokenised here or, with several `workers`, ahead in as many processes, which live
    from entering to leaving the context."""

    def __init__(self, rows: StreamRows, lanes: int, workers: int):
        self.rows, self.ahead = rows, max(1, -(-_AHEAD * workers // max(1, lanes)))
        self._pool = task_pool(pickle.dumps(rows.task), workers) if workers > 1 else None
        self._pending: dict[BlockPlace, Future[TokenBlock]] = {}

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def request(self, place: BlockPlace) -> None:
        """Has a block tokenised that will be read."""
        if self._pool is not None and place not in self._pending:
            self._pending[place] = self._pool.submit(self.rows.block_task(place))

    def read(self, place: BlockPlace, *, ahead: bool = True) -> list[Example]:
        """The examples of a block; requests those that follow. Raises UserError, naming the record, as readers and
        templates do."""
        if self._pool is None:
            return self.rows.tokenise(self.rows.block_task(place)).examples
        self.request(place)
        lane, epoch, number = place
        for following in range(number + 1, number + 1 + self.ahead if ahead else 0):
            later, within = divmod(following, self.rows.blocks(lane))
            self.request((lane, epoch + later, within))
        return self._pending.pop(place).result().examples


@dataclasses.dataclass(frozen=True)
class LanePosition:
    """A position in a lane: the epoch and the block there, the example in the block, and how many of its positions are
    used. Of a packed lane it is the first block of those that are packed together, with units of earlier blocks
    (`carried`: block and number), and the row of these."""

    epoch: int = 0
    block: int = 0
    item: int = 0
    used: int = 0
    carried: tuple[tuple[int, int], ...] = ()


class Lane(Protocol):
    """A lane that is read from a position on. `position` is where the next row begins."""

    position: LanePosition

    def row(self) -> Sequence[Example]:
        """The examples of the next row. Raises UserError as a BlockReader does, and if an epoch has none."""
        ...


def _nothing_error() -> UserError:
    return UserError(
        "the data contain nothing to train on",
        where="data.train",
        fix="raise data.max_length, or check roles, message weights and empty texts",
    )


class ContinuedLane:
    """A lane whose documents are continued in the next row."""

    def __init__(self, rows: StreamRows, reader: BlockReader, number: int, position: LanePosition):
        self.rows, self.reader, self.number, self.position = rows, reader, number, position
        self._block: list[Example] | None = None

    def row(self) -> Sequence[Example]:
        room, examples = self.rows.row_length, list[Example]()
        while room:
            example, used = self._current(), self.position.used
            count = min(len(example.ids) - 1 - used, room)
            span = slice(used, used + count + 1)
            examples.append(dataclasses.replace(example, ids=example.ids[span], weights=example.weights[span]))
            room -= count
            if used + count < len(example.ids) - 1:
                self.position = dataclasses.replace(self.position, used=used + count)
            else:
                self.position = dataclasses.replace(self.position, item=self.position.item + 1, used=0)
        return examples

    def _current(self) -> Example:
        """The document at the position, which is moved past those of one token."""
        blocks = self.rows.blocks(self.number)
        for _ in range(blocks + 1):
            epoch, number, item = self.position.epoch, self.position.block, self.position.item
            if self._block is None:
                self._block = self.reader.read((self.number, epoch, number))
            for later in range(item, len(self._block)):
                if len(self._block[later].ids) > 1:
                    if later > item:
                        self.position = LanePosition(epoch, number, later)
                    return self._block[later]
            self._block = None
            self.position = LanePosition(epoch, number + 1) if number + 1 < blocks else LanePosition(epoch + 1)
        raise _nothing_error()


class PackedLane:
    """A lane whose units are packed, some rows at a time."""

    def __init__(self, rows: StreamRows, reader: BlockReader, number: int, position: LanePosition):
        self.rows, self.reader, self.number, self.position = rows, reader, number, position
        self._carried: list[list[Example]] | None = None
        self._packed: list[list[Example]] | None = None
        self._next = position

    def row(self) -> Sequence[Example]:
        empty = 0  # epochs
        while True:
            if self._packed is None:
                self._packed = self._pack()
            if self.position.item < len(self._packed):
                self.position = dataclasses.replace(self.position, item=self.position.item + 1)
                return self._packed[self.position.item - 1]
            empty += self._next.epoch > self.position.epoch and not self._packed
            if empty > 1:
                raise _nothing_error()
            self.position, self._packed = self._next, None

    def _pack(self) -> list[list[Example]]:
        """The examples of each row of those that are packed together from the position on; sets what follows."""
        rows, epoch, number = self.rows, self.position.epoch, self.position.block
        keys, units = list(self.position.carried), self._carried
        if units is None:  # the first rows of a resumed run
            units, read = [], {block: self._read(block, ahead=False) for block in sorted({key[0] for key in keys})}
            units += [read[block][unit] for block, unit in keys]
        used = sum(len(example.ids) - 1 for unit in units for example in unit)
        while number < rows.blocks(self.number) and used < PACKED_ROWS * rows.row_length:
            block = self._read(number)
            keys += [(number, unit) for unit in range(len(block))]
            units += block
            used += sum(len(example.ids) - 1 for unit in block for example in unit)
            number += 1
        packed = rows.pack([example for unit in units for example in unit]) if units else []
        self._carried, self._next = [], LanePosition(epoch + 1)
        if number < rows.blocks(self.number):
            carried = np.empty(0, np.int64)
            if rows.packing:
                filled = [sum(len(example.ids) - 1 for unit in row for example in units[unit]) for row in packed]
                carried = packed.pop(int(np.argmin(filled)))
            self._carried = [units[unit] for unit in carried]
            self._next = LanePosition(epoch, number, carried=tuple(keys[unit] for unit in carried))
        return [[example for unit in row for example in units[unit]] for row in packed]

    def _read(self, number: int, *, ahead: bool = True) -> list[list[Example]]:
        """The units of a block."""
        examples = self.reader.read((self.number, self.position.epoch, number), ahead=ahead)
        size = self.rows.unit_size
        return [examples[start : start + size] for start in range(0, len(examples), size)]


class Stream:
    """Batches like those of data.loader.Loader, for a run of `steps` updates. `journal` is a file, or None; a process
    with a share of the rows has one for itself next to it.

    `fingerprint` is a hash of what the batches depend on: entries of the journal with another one are ignored.
    `workers` are the processes that tokenise for `iterate` (1: this one).
    """

    def __init__(
        self,
        rows: StreamRows,
        *,
        steps: int,
        fingerprint: str = "",
        journal: pathlib.Path | None = None,
        workers: int = 1,
    ):
        self.rows, self.steps, self.fingerprint, self.journal, self.workers = rows, steps, fingerprint, journal, workers
        self.documents, self.row_length, self.batch_size = rows.documents, rows.row_length, rows.batch_size
        self._rows = self._counted = range(rows.batch_size)

    def share(self, rows: Sequence[int], counted: Sequence[int], *, processes: int = 1) -> None:
        """Reads only `rows` of every update from now on; others are empty. No other process counts the tokens of
        `counted`. All are read where the weight of a token depends on all. The `processes` of a host have its workers
        together."""
        self.workers = max(1, self.workers // processes)
        units = self.rows.units
        if units is None or units.nll is None or units.nll_mean == "pairs":
            self._rows, self._counted = rows, counted

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

    def empty_arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the shapes of every batch."""
        return self.rows.batch([()] * self.batch_size, 0, 0).arrays

    def batch(self, step: int) -> HostBatch:
        """The batch of update `step`, counted from 0."""
        with BlockReader(self.rows, len(self._lanes()), 1) as reader:
            return next(self._batches(step, reader))

    def iterate(self, start: int = 0, stop: int | None = None, *, prefetch: int = 4) -> Iterator[HostBatch]:
        """Batches from `start` up to, not including, `stop`. A thread prepares `prefetch` ahead."""
        remaining = itertools.count() if stop is None else iter(range(stop - start))
        with (
            BlockReader(self.rows, len(self._lanes()), self.workers) as reader,
            ThreadPoolExecutor(1, "stream") as thread,
        ):
            batches = self._batches(start, reader, write_journal=True)
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

    def _lanes(self) -> dict[int, list[int]]:
        """The lanes that are read, and the rows of each; some rows may be other processes'."""
        size = self.batch_size // self.rows.lanes
        return {
            lane: list(range(lane * size, (lane + 1) * size)) for lane in sorted({row // size for row in self._rows})
        }

    def _batches(self, first_step: int, reader: BlockReader, *, write_journal: bool = False) -> Iterator[HostBatch]:
        rows_of, counted = self._lanes(), set(self._counted)
        step, positions = self._latest_entry(first_step, set(rows_of))
        for lane, position in positions.items():
            reader.request((lane, position.epoch, position.block))
        lanes = {lane: self.rows.lane(lane, reader, positions[lane]) for lane in rows_of}
        recorded = [lane for lane, rows in rows_of.items() if rows[0] in counted]
        read = set(self._rows)
        while True:
            if write_journal and step % JOURNAL_INTERVAL == 0 and recorded:
                self._append_entry(step, {lane: lanes[lane].position for lane in recorded})
            rows: list[Sequence[Example]] = [()] * self.batch_size
            for lane, numbers in rows_of.items():
                for number in numbers:
                    row = lanes[lane].row()
                    rows[number] = row if number in read else ()
            if step >= first_step:
                yield self._batch(rows, step, min(lane.position.epoch for lane in lanes.values()))
            step += 1

    def _batch(self, rows: Sequence[Sequence[Example]], step: int, epoch: int) -> HostBatch:
        batch = self.rows.batch(rows, step, epoch)
        if len(self._counted) == self.batch_size:
            return batch
        counted = [example for row in self._counted for example in rows[row]]
        tokens = sum(len(example.ids) - 1 for example in counted)
        learned = sum(int(np.count_nonzero(example.weights[1:])) for example in counted)
        return dataclasses.replace(batch, counts=(tokens, learned))

    def _latest_entry(self, step: int, lanes: set[int]) -> tuple[int, dict[int, LanePosition]]:
        """The last step at or before `step` for which the journals have the positions of all `lanes`, and these; the
        start if there is none.

        Entries that are incomplete or damaged are ignored: the data after an earlier entry are read again.
        """
        recorded = collections.defaultdict[int, dict[int, LanePosition]](dict)
        recorded[0] = dict.fromkeys(lanes, LanePosition())
        for file in () if self.journal is None else self.journal.parent.glob(f"{self.journal.stem}*.jsonl"):
            for entry in filter(None, map(_parse_entry, file.read_bytes().splitlines())):
                if entry["data"] == self.fingerprint and entry["step"] <= step:
                    for lane, (epoch, block, item, used, carried) in entry["lanes"]:
                        if lane in lanes:
                            units = tuple((block, unit) for block, unit in carried)
                            recorded[entry["step"]][lane] = LanePosition(epoch, block, item, used, units)
        latest = max(step for step, positions in recorded.items() if len(positions) == len(lanes))
        return latest, recorded[latest]

    def _append_entry(self, step: int, positions: dict[int, LanePosition]) -> None:
        if self.journal is None:
            return
        is_share, first = len(self._counted) < self.batch_size, min(positions)
        journal = self.journal.with_stem(f"{self.journal.stem}-{first}") if is_share else self.journal
        lanes = [[lane, [*dataclasses.astuple(position)]] for lane, position in positions.items()]
        entry = {"step": step, "lanes": lanes, "data": self.fingerprint}
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "crc32": _entry_checksum(entry)}) + "\n")


def _entry_checksum(entry: dict) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode())


def _parse_entry(line: bytes) -> dict | None:
    """An entry of the journal; None if it is incomplete, because its run was killed, does not match its checksum, or is
    of an earlier version."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        entry = json.loads(line)
        if entry.pop("crc32") == _entry_checksum(entry) and "lanes" in entry:
            return entry
    return None
