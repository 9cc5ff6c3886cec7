"""Opens the sources of a recipe and reads all their records once: which can be used, and their digests."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.conversation import Origin, Sample
from meshtune.data.formats import FORMATS_BY_TYPE, select_format
from meshtune.data.formats.record import (
    FieldNames,
    RecordFormat,
    describe,
    has_pictures,
    passed_over,
    read_record,
    unread_fields,
)
from meshtune.data.mixing import draw
from meshtune.data.progress import Progress
from meshtune.data.readers.textfiles import Records, offset_type
from meshtune.data.sources import DataSource, open_source
from meshtune.data.store import DIGEST_BYTES, fingerprint, sample_digest, write_file
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from meshtune.data.pictures.files import PictureFiles
    from meshtune.objectives.stages import DatasetType

open_pictures = LazyFunction("meshtune.data.pictures.files:open_pictures")
run_cache = LazyFunction("meshtune.data.readers.parquet:RunCache")
place_pictures = LazyFunction("meshtune.data.formats.pictures:place_pictures")
DETECTION_RECORDS = 20  # readable records that a format is detected from
DETECTION_LIMIT = 1000  # records read at most to find them among malformed ones
SAMPLE_STREAM = 0x736D70  # makes draws independent of others with the same seed
RANGE = 1 << 16  # records that are checked as one task
_LEAST_RANGE = 1024  # records
NO_DIGESTS = np.empty((0, DIGEST_BYTES), np.uint8)


@dataclasses.dataclass(frozen=True)
class SkippedRecord:
    """A record that was left out, and why."""

    origin: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CheckedSource:
    """A source whose records were read once. `usable` [n] are the indices of those to train on.

    `digests` uint8 [records, DIGEST_BYTES] are those of checked samples, by the index of the record; empty if the
    records were not checked, and mapped from a temporary file if there are many. `unread` are the names of fields that
    the format passes over. `pictures` opens those of records; None: there must be none. A copy in another process looks
    up its format, whose functions are not pickled.
    """

    source: DataSource
    dataset_type: DatasetType
    records: Records
    format: RecordFormat
    fields: FieldNames
    usable: np.ndarray
    digests: np.ndarray = dataclasses.field(default_factory=lambda: NO_DIGESTS)
    unread: tuple[str, ...] = ()
    pictures: PictureFiles | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "format": self.format.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        form = FORMATS_BY_TYPE[state["dataset_type"]][state["format"]]
        vars(self).update(state, format=form)

    def sample(self, index: int) -> Sample:
        """Reads and converts the record at `index`."""
        return _convert(self.records[index], self, self.records.origin(index))


def _convert(record: object, checked: CheckedSource, origin: Origin) -> Sample:
    if not isinstance(record, dict):
        raise _not_an_object_error(record, origin)
    sample = read_record(checked.format, record, checked.fields, checked.source.tags, origin)
    if checked.pictures is None and not has_pictures(sample, record, checked.fields):
        return sample
    return open_pictures(
        place_pictures(sample, record, checked.fields, origin), checked.pictures, checked.source.pictures_folder
    )


def _not_an_object_error(record: object, origin: Origin) -> UserError:
    problem = f"the record is not an object, found {describe(record)}"
    return UserError(problem, where=str(origin), fix='write it as {"field": value}')


def open_unchecked(
    source: DataSource,
    on_bad: str,
    seed: int,
    dataset_type: DatasetType,
    pictures: PictureFiles | None = None,
    *,
    streaming: bool = False,
) -> CheckedSource:
    """The source with all its records, up to its cap, as usable, with `streaming` for any order. Reads those that its
    format is detected from."""
    checked = _open(source, on_bad, dataset_type, pictures, streaming)
    if streaming:
        checked = dataclasses.replace(checked, records=checked.records.random_access(run_cache()))
    count = min(len(checked.records), source.cap or len(checked.records))
    indices = np.arange(count, dtype=offset_type(count))
    first = itertools.islice(checked.records.sweep(), DETECTION_RECORDS)
    names = {name for record in first if isinstance(record, dict) for name in passed_over(record, source.tags)}
    unread = tuple(unread_fields(names, checked.fields))
    return dataclasses.replace(checked, usable=_sample(indices, source.sample, seed), unread=unread)


@dataclasses.dataclass(frozen=True)
class CheckedRange:
    """The result of reading consecutive records: `usable` [n] are the numbers of those to train on, `digests`
    uint8 [records, DIGEST_BYTES] those of samples, and `names` those of fields that the format passes over."""

    usable: np.ndarray
    digests: np.ndarray
    skipped: list[SkippedRecord]
    names: set[str]


@dataclasses.dataclass(frozen=True)
class CheckTask:
    """Reads and converts the records of `checked`, whose first has the number `start`, until `limit` are usable.
    The result is in `file`, if that is not None, for a preparation that is interrupted and for other hosts."""

    checked: CheckedSource
    start: int
    limit: int
    on_bad: str
    file: pathlib.Path | None = None

    def make(self, _: object = None, report: Callable[[int], None] = lambda _: None) -> CheckedRange:
        """Reads the records. Raises UserError for the first that cannot be used, as `on_bad` says, and for a file that
        was changed meanwhile."""
        records, usable, digests = self.checked.records, array.array("q"), bytearray()
        names, skipped = set[str](), list[SkippedRecord]()
        for index, record in enumerate(records.sweep()):
            if len(usable) == self.limit:
                break
            if index % 256 == 0:
                report(index)
            try:
                if isinstance(record, UserError):
                    raise record
                digests += sample_digest(_convert(record, self.checked, records.origin(index)))
                names |= passed_over(record, self.checked.source.tags)  # pyright: ignore[reportArgumentType] - an object, since it was converted
                usable.append(self.start + index)
            except UserError as error:
                _refuse_or_skip(error, self.on_bad, skipped, self.checked, index)
                digests += bytes(DIGEST_BYTES)
        records.check_unchanged()
        rows = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
        numbers = np.array(usable, offset_type(self.start + len(records)))
        result = CheckedRange(numbers, rows, skipped, names)
        if self.file is not None:
            _save_range(self.file, result)
        return result

    def load(self) -> CheckedRange | None:
        """The result of an earlier call; None if there is none, or if it is damaged."""
        assert self.file is not None
        try:
            with np.load(self.file, allow_pickle=False) as stored:
                facts = json.loads(stored["facts"].tobytes())
                skipped = [SkippedRecord(*item) for item in facts["skipped"]]
                return CheckedRange(stored["usable"], stored["digests"], skipped, set(facts["names"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def _save_range(file: pathlib.Path, result: CheckedRange) -> None:
    facts = {"skipped": [dataclasses.astuple(item) for item in result.skipped], "names": sorted(result.names)}
    buffer, encoded = io.BytesIO(), np.frombuffer(json.dumps(facts).encode(), np.uint8)
    np.savez(buffer, facts=encoded, usable=result.usable, digests=result.digests)
    with contextlib.suppress(OSError):  # then it is read again where it is needed
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, buffer.getvalue())


@dataclasses.dataclass(frozen=True)
class TaskList(Sequence[Any]):
    """`size` tasks. `task(number)` makes one when it is read."""

    size: int
    task: Callable[[int], Any]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= number < self.size:
            raise IndexError(number)
        return self.task(number)


def run_here(tasks: Sequence[Any], done: Callable[[int], None]) -> Iterator[Any]:
    """The results of tasks in order. `done` is told how many there are."""
    for number, task in enumerate(tasks, start=1):
        yield task.make()
        done(number)


RunTasks = Callable[[Sequence[Any], Callable[[int], None]], Iterable[Any]]
"""Runs tasks here or elsewhere, as run_here does."""


def check_source(
    source: DataSource,
    on_bad: str,
    seed: int,
    skipped: list[SkippedRecord],
    dataset_type: DatasetType,
    progress: Progress | None = None,
    pictures: PictureFiles | None = None,
    run: RunTasks = run_here,
    folder: pathlib.Path | None = None,
) -> CheckedSource:
    """Reads and converts all records of a source, up to its cap, keeping the indices of the usable ones.

    Many records are read in tasks that `run` runs, whose results are in `folder`. Adds records that are not usable to
    `skipped`, or raises UserError for the first of them, as `on_bad` says; raises it for a source without a usable
    record, and for a file that changed meanwhile.
    """
    checked = _open(source, on_bad, dataset_type, pictures)
    size = len(checked.records)
    limit = min(size, source.cap or size)
    report = functools.partial(progress or (lambda *_: None), f"reading {source.path}")

    def advance(begin: int, step: int, done: int) -> None:
        report(min(begin + done * step, limit), limit)

    ranges, start, count = list[CheckedRange](), 0, 0
    while start < size and count < limit:
        stop = min(size, start + max(limit - count, _LEAST_RANGE))  # as many as may be needed, if all are usable
        if stop - start <= RANGE:
            task = CheckTask(_select_range(checked, start, stop), start, limit - count, on_bad)
            ranges.append(task.make(report=functools.partial(advance, start, 1)))
        else:
            task = functools.partial(_check_task, checked, start, stop, on_bad, folder)
            tasks = TaskList(-(-(stop - start) // RANGE), task)
            ranges += run(tasks, functools.partial(advance, start, RANGE))
        start, count = stop, sum(len(part.usable) for part in ranges)
    unusable = [item for part in ranges for item in part.skipped]
    skipped += unusable
    if not count:
        raise _nothing_usable_error(checked, unusable)
    report(limit, limit)
    names = set[str]().union(*(part.names for part in ranges))
    return dataclasses.replace(
        checked,
        usable=_sample(np.concatenate([part.usable for part in ranges]), source.sample, seed),
        digests=_join_digests([part.digests for part in ranges]),
        unread=tuple(unread_fields(names, checked.fields)),
    )


def _join_digests(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The digests of several ranges, in a temporary file without a name if there are many."""
    count = sum(map(len, parts))
    if count <= RANGE:
        return np.concatenate(parts)
    try:
        with tempfile.TemporaryFile() as file:
            for part in parts:
                file.write(part.tobytes())
            file.flush()
            return np.memmap(file, np.uint8, "r", shape=(count, DIGEST_BYTES))
    except OSError:  # the disk is full: memory may do
        return np.concatenate(parts)


def _select_range(checked: CheckedSource, start: int, stop: int) -> CheckedSource:
    if start == 0 and stop == len(checked.records):
        return checked
    return dataclasses.replace(checked, records=checked.records.select(np.arange(start, stop)))


def _check_task(
    checked: CheckedSource, start: int, stop: int, on_bad: str, folder: pathlib.Path | None, number: int
) -> CheckTask:
    """A task for a range of the records from `start` to `stop`, whose file is named after all that its result
    depends on."""
    start, stop = start + number * RANGE, min(stop, start + (number + 1) * RANGE)
    facts = (checked.source, checked.format.name, on_bad, start, stop, sorted(checked.records.files.items()))
    file = None if folder is None else folder / f"{fingerprint(repr(facts))}.npz"
    return CheckTask(_select_range(checked, start, stop), start, stop - start, on_bad, file)


def _nothing_usable_error(checked: CheckedSource, skipped: list[SkippedRecord]) -> UserError:
    example = f", the first because: {skipped[0].reason}" if skipped else ""
    problem = f"no record of this source can be used as format {checked.format.name}: "
    problem += f"{'the only one was' if len(skipped) == 1 else f'all {len(skipped):,} were'} skipped{example}"
    return UserError(problem, where=checked.source.path, fix="correct the records, or name another format")


def check_usable(checked: CheckedSource, on_bad: str, skipped: list[SkippedRecord]) -> CheckedSource:
    """The source with only those usable records that can be converted; it has digests of these."""
    readable: list[int] = []
    digests = np.zeros((int(checked.usable.max(initial=0)) + 1, DIGEST_BYTES), np.uint8)
    for start in range(0, len(checked.usable), RANGE):
        numbers = checked.usable[start : start + RANGE]
        chosen = dataclasses.replace(checked, records=checked.records.select(numbers))
        for place, index in enumerate(numbers.tolist()):
            try:
                digests[index] = np.frombuffer(sample_digest(chosen.sample(place)), np.uint8)
            except UserError as error:
                _refuse_or_skip(error, on_bad, skipped, checked, index)
            else:
                readable.append(index)
    return dataclasses.replace(checked, usable=np.array(readable, np.int64), digests=digests)


def _open(
    source: DataSource, on_bad: str, dataset_type: DatasetType, pictures: PictureFiles | None, streaming: bool = False
) -> CheckedSource:
    records = open_source(source, streaming=streaming)
    form = _select_format(source, records, on_bad, dataset_type)
    fields = form.resolve(source.columns)
    return CheckedSource(source, dataset_type, records, form, fields, np.empty(0, np.int64), pictures=pictures)


def _refuse_or_skip(
    error: UserError, on_bad: str, skipped: list[SkippedRecord], checked: CheckedSource, index: int
) -> None:
    if on_bad == "error":
        raise _with_location(error, checked.records, index, checked.format) from None
    places = checked.records.where(index), str(checked.records.origin(index))
    skipped.append(SkippedRecord(places[1], _one_line(error, places)))


def _sample(indices: np.ndarray, count: int | None, seed: int) -> np.ndarray:
    """`count` of the indices drawn by the seed; all of them if `count` is None."""
    if count is None:
        return indices
    return indices[draw(len(indices), count, np.random.default_rng([seed, SAMPLE_STREAM]))]


def _select_format(source: DataSource, records: Records, on_bad: str, dataset_type: DatasetType) -> RecordFormat:
    if source.format != "auto":
        return select_format(source.format, [], source.path, source.columns, source.tags, dataset_type)
    first: list[object] = []
    for index, record in enumerate(itertools.islice(records.sweep(), DETECTION_LIMIT)):
        if isinstance(record, UserError):
            if on_bad == "error":
                raise _with_location(record, records, index, None)
        elif isinstance(record, dict):
            first.append(record)
        if len(first) == DETECTION_RECORDS:
            break
    return select_format("auto", first, source.path, source.columns, source.tags, dataset_type)


def _with_location(error: UserError, records: Records, index: int, form: RecordFormat | None) -> UserError:
    """The error with the record's line, the format it was read as, and the option that skips such records."""
    origin, place = str(records.origin(index)), records.where(index)
    where = (error.where or origin).replace(place, origin, 1)  # some readers name the line, others do not
    if where.startswith(origin):
        where = f"{place}{where.removeprefix(origin)}"
        if form is not None:
            where += f" (format {form.name})"
    elif origin not in where:
        where = f"{where} (record {records.origin(index).record})"
    remedy = "data.on_bad=skip leaves such records out"
    return UserError(error.what, where=where, fix=f"{error.fix}; or {remedy}" if error.fix else remedy)


def _one_line(error: UserError, places: Sequence[str]) -> str:
    """The problem and its field, without the place of the record."""
    field = error.where or ""
    for place in places:
        field = field.removeprefix(place)
    field = field.removeprefix(", ")
    return f"{field}: {error.what}" if field else error.what
