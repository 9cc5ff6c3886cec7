"""The documents of a recipe: every record of every source is checked once and mixed with the others, then read again on
access.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from meshtune.config.data_options import SourceOptions
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Origin, Sample, add_system
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
from meshtune.data.mixing import apportion, draw, mix
from meshtune.data.progress import Progress
from meshtune.data.readers.textfiles import Records
from meshtune.data.sources import DataSource, open_source
from meshtune.data.store import DIGEST_BYTES, fingerprint, sample_digest, write_file
from meshtune.errors import UserError, amount
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from meshtune.data.pictures.files import PictureFiles
    from meshtune.data.registry import Registry
    from meshtune.objectives.stages import DatasetType

open_pictures = LazyFunction("meshtune.data.pictures.files:open_pictures")
place_pictures = LazyFunction("meshtune.data.formats.pictures:place_pictures")
load_registry = LazyFunction("meshtune.data.registry:load_registry")
DETECTION_RECORDS = 20  # readable records that a format is detected from
DETECTION_LIMIT = 1000  # records read at most to find them among malformed ones
SAMPLE_STREAM = 0x736D70  # makes draws independent of others with the same seed
RANGE = 1 << 16  # records that are checked as one task
_LEAST_RANGE = 1024  # records
_NO_DIGESTS = np.empty((0, DIGEST_BYTES), np.uint8)


@dataclasses.dataclass(frozen=True)
class SkippedRecord:
    """A record that was left out, and why."""

    origin: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CheckedSource:
    """A source whose records were read once. `usable` int64 [n] are the indices of those to train on.

    `digests` uint8 [records, DIGEST_BYTES] are those of checked samples, by the index of the record; empty if the
    records were not checked. `unread` are the names of fields that the format passes over. `pictures` opens those of
    records; None: there must be none. A copy in another process looks up its format, whose functions are not pickled.
    """

    source: DataSource
    dataset_type: DatasetType
    records: Records
    format: RecordFormat
    fields: FieldNames
    usable: np.ndarray
    digests: np.ndarray = dataclasses.field(default_factory=lambda: _NO_DIGESTS)
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
    source: DataSource, on_bad: str, seed: int, dataset_type: DatasetType, pictures: PictureFiles | None = None
) -> CheckedSource:
    """The source with all its records, up to its cap, as usable. Reads those that its format is detected from."""
    checked = _open(source, on_bad, dataset_type, pictures)
    indices = np.arange(min(len(checked.records), source.cap or len(checked.records)), dtype=np.int64)
    first = itertools.islice(checked.records.sweep(), DETECTION_RECORDS)
    names = {name for record in first if isinstance(record, dict) for name in passed_over(record, source.tags)}
    unread = tuple(unread_fields(names, checked.fields))
    return dataclasses.replace(checked, usable=_sample(indices, source.sample, seed), unread=unread)


@dataclasses.dataclass(frozen=True)
class CheckedRange:
    """The result of reading consecutive records: `usable` int64 [n] are the numbers of those to train on, `digests`
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
        result = CheckedRange(np.array(usable, np.int64), rows, skipped, names)
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
    return dataclasses.replace(
        checked,
        usable=_sample(np.concatenate([part.usable for part in ranges]), source.sample, seed),
        digests=np.concatenate([part.digests for part in ranges]),
        unread=tuple(unread_fields(set[str]().union(*(part.names for part in ranges)), checked.fields)),
    )


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
    digests = np.zeros((int(checked.usable.max(initial=-1)) + 1, DIGEST_BYTES), np.uint8)
    for index in checked.usable.tolist():
        try:
            digests[index] = np.frombuffer(sample_digest(checked.sample(index)), np.uint8)
        except UserError as error:
            _refuse_or_skip(error, on_bad, skipped, checked, index)
        else:
            readable.append(index)
    return dataclasses.replace(checked, usable=np.array(readable, np.int64), digests=digests)


def _open(source: DataSource, on_bad: str, dataset_type: DatasetType, pictures: PictureFiles | None) -> CheckedSource:
    records = open_source(source)
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


SPLIT_STREAM = 0x73706C  # makes draws independent of others with the same seed
_HASHED = 1 << 16  # digests hashed at a time


class DocumentList(Sequence[Sample]):
    """Samples that are read from their sources on access. Only two integers per sample are kept in memory.

    `source` int32 [n] is the index of each sample's source in `sources`, `record` int64 [n] its record there. `system`
    is put before every conversation that has no system turn.
    """

    def __init__(
        self, sources: Sequence[CheckedSource], source: np.ndarray, record: np.ndarray, system: str | None = None
    ):
        self.sources, self.source, self.record, self.system = list(sources), source, record, system

    def with_system(self, system: str | None) -> DocumentList:
        """The samples with a system prompt before every conversation that has none."""
        return DocumentList(self.sources, self.source, self.record, system)

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> DocumentList: ...

    def __getitem__(self, index: int | slice) -> Sample | DocumentList:
        if isinstance(index, slice):
            return DocumentList(self.sources, self.source[index], self.record[index], self.system)
        sample = self.sources[self.source[index]].sample(int(self.record[index]))
        return sample if self.system is None else add_system(sample, self.system)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def origin(self, index: int) -> Origin:
        """The origin of a sample, without reading it."""
        return self.sources[self.source[index]].records.origin(int(self.record[index]))

    def take(self, numbers: np.ndarray) -> DocumentList:
        """The samples of these numbers, int [n], in their order."""
        return DocumentList(self.sources, self.source[numbers], self.record[numbers], self.system)

    def compact(self) -> DocumentList:
        """The samples with only those records that they are made from, for another process."""
        source, record, sources = self.source.copy(), self.record.copy(), list[CheckedSource]()
        for index in np.unique(self.source).tolist():
            chosen = self.source == index
            numbers, record[chosen] = np.unique(self.record[chosen], return_inverse=True)
            source[chosen] = len(sources)
            records = self.sources[index].records.select(numbers)
            empty = {"usable": numbers[:0], "digests": _NO_DIGESTS}
            sources.append(dataclasses.replace(self.sources[index], records=records, **empty))
        return DocumentList(sources, source, record, self.system)

    def content_hash(self) -> str:
        """A hash of all samples in order and of the system prompt, from the digests made as records were checked."""
        digest = hashlib.sha256()
        for start in range(0, len(self), _HASHED):
            source, record = self.source[start : start + _HASHED], self.record[start : start + _HASHED]
            digests = np.empty((len(source), DIGEST_BYTES), np.uint8)
            for index in np.unique(source):
                digests[source == index] = self.sources[index].digests[record[source == index]]
            digest.update(digests.tobytes())
        return hashlib.sha256(f"{digest.hexdigest()} {self.system!r}".encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Raises UserError if a file has changed since it was opened."""
        for checked in self.sources:
            checked.records.check_unchanged()


@dataclasses.dataclass(frozen=True)
class Documents:
    """The training and validation data of a recipe. `formats` maps the path of each source to its format, `unread` to
    the names of fields that its format passes over."""

    train: DocumentList
    validation: DocumentList | None
    skipped: list[SkippedRecord]
    formats: dict[str, str]
    unread: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def load_documents(
    data: DataSection,
    *,
    seed: int,
    dataset_type: DatasetType = "documents",
    progress: Progress | None = None,
    pictures: PictureFiles | None = None,
    run: RunTasks = run_here,
    folder: pathlib.Path | None = None,
) -> Documents:
    """Reads and checks every record of the sources, then splits and mixes them; a pure function of files and seed.

    Validation given as a share (below 1) or a count (1 and above) is drawn by the seed from the records before they are
    mixed, from each source in proportion, so that a repeated record is never on both sides. At least one record is held
    out. Validation sources are concatenated. `dataset_type` is what the records must be converted to. `progress` is
    called as each source is read. `pictures` opens those of records; without it a record with pictures is malformed.
    `run` and `folder` are as in `check_source`.

    Raises UserError at the first malformed record (with `on_bad: error`), for a source without a usable record, for a
    validation share that would leave a source nothing to train on, and as readers, formats and registry do.
    """
    skipped: list[SkippedRecord] = []

    def check_all(sections: Sequence[SourceSection]) -> list[CheckedSource]:
        return [
            check_source(source, data.on_bad, seed, skipped, dataset_type, progress, pictures, run, folder)
            for source in data_sources(data, sections, dataset_type)
        ]

    train = check_all(data.train)
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        validation = _concatenate(check_all(data.validation))
    elif data.validation is not None:
        train, held_out = _hold_out(train, data.validation, seed)
        validation = _concatenate(held_out)
    return _documents(_mix_sources(train, data.mixing, seed), validation, skipped)


def open_documents(
    data: DataSection, *, seed: int, dataset_type: DatasetType = "documents", pictures: PictureFiles | None = None
) -> Documents:
    """The data of a recipe, of whose training records only the first few are read: for data too large to be read twice.

    Sources are mixed, and records held out, as by `load_documents`; validation records are all checked. Reading a
    malformed training record raises UserError on access.
    """
    skipped: list[SkippedRecord] = []
    train = [
        open_unchecked(source, data.on_bad, seed, dataset_type, pictures)
        for source in data_sources(data, data.train, dataset_type)
    ]
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        sources = data_sources(data, data.validation, dataset_type)
        validation = _concatenate(
            [check_source(source, data.on_bad, seed, skipped, dataset_type, pictures=pictures) for source in sources]
        )
    elif data.validation is not None:
        train, held_out = _hold_out(train, data.validation, seed)
        readable = [check_usable(checked, data.on_bad, skipped) for checked in held_out]
        if not any(len(checked.usable) for checked in readable):
            held_out_records = amount(len(skipped), "record")
            problem = f"of {held_out_records} held out none can be used, the first because: {skipped[0].reason}"
            raise UserError(problem, where="data.validation", fix="hold out more, or correct the records")
        validation = _concatenate(readable)
    return _documents(_mix_sources(train, data.mixing, seed), validation, skipped)


def _documents(train: DocumentList, validation: DocumentList | None, skipped: list[SkippedRecord]) -> Documents:
    sources = [*train.sources, *(validation.sources if validation else [])]
    formats = {checked.source.path: checked.format.name for checked in sources}
    unread = {checked.source.path: checked.unread for checked in sources if checked.unread}
    return Documents(train, validation, skipped, formats, unread)


def _check_unweighted(validation: Sequence[SourceSection]) -> None:
    for index, section in enumerate(validation):
        if section.weight is not None:
            where = f"data.validation[{index}].weight"
            raise UserError("validation sources have no weights", where=where, fix="use cap instead")


def data_sources(data: DataSection, sections: Sequence[SourceSection], dataset_type: DatasetType) -> list[DataSource]:
    """The sources that sections of a recipe describe, by its registry too."""
    registry = load_registry(data.registry) if data.registry else None
    return [_data_source(section, registry, dataset_type) for section in sections]


def _data_source(section: SourceSection, registry: Registry | None, dataset_type: DatasetType) -> DataSource:
    if section.name is not None:
        assert registry is not None, "DataSection refuses a name without a registry"
        return registry.source(section, dataset_type)
    options = {field.name: getattr(section, field.name) for field in dataclasses.fields(SourceOptions)}
    return DataSource(path=section.path or "", **options)


def _mix_sources(sources: list[CheckedSource], mixing: str, seed: int) -> DocumentList:
    if mixing == "concat" and all(checked.source.weight is None for checked in sources):
        return _concatenate(sources)
    lengths, weights = [len(checked.usable) for checked in sources], [checked.source.weight for checked in sources]
    source, position = mix(lengths, weights, mixing, seed)
    record = np.empty(len(position), np.int64)
    for index, checked in enumerate(sources):
        chosen = source == index
        record[chosen] = checked.usable[position[chosen]]
    return DocumentList(sources, source, record)


def _concatenate(sources: list[CheckedSource]) -> DocumentList:
    used = [checked for checked in sources if len(checked.usable)]
    source = np.repeat(np.arange(len(used), dtype=np.int32), [len(checked.usable) for checked in used])
    return DocumentList(used, source, np.concatenate([checked.usable for checked in used]))


def _hold_out(
    sources: list[CheckedSource], validation: float, seed: int
) -> tuple[list[CheckedSource], list[CheckedSource]]:
    """The sources without the held-out records, and with only those. All repeats of a record are on the same side."""
    distinct = [np.unique(checked.usable) for checked in sources]
    sizes = np.array([len(indices) for indices in distinct])
    total = int(sizes.sum())
    count = max(1, round(validation * total)) if validation < 1 else int(validation)
    counts = np.minimum(apportion(count, sizes / total), sizes - 1)
    for index in np.argsort(-sizes, kind="stable"):  # large sources make up for what small ones could not give
        counts[index] += min(count - int(counts.sum()), int(sizes[index] - 1 - counts[index]))
    if counts.sum() < count:
        limit = f"hold out at most {total - len(sources)}, " if total > len(sources) else ""
        requested = f"a share of {validation:g}" if validation < 1 else f"{count}"
        records = amount(total, "record")
        raise UserError(
            f"holding out {requested} of {records} ({count}) would leave a source without training data",
            where="data.validation",
            fix=f"{limit}add records, or give separate validation files",
        )
    rng = np.random.default_rng([seed, SPLIT_STREAM])
    train, held_out = [], []
    for checked, indices, size in zip(sources, distinct, counts, strict=True):
        drawn = np.sort(rng.permutation(indices)[:size])
        train.append(dataclasses.replace(checked, usable=checked.usable[~np.isin(checked.usable, drawn)]))
        held_out.append(dataclasses.replace(checked, usable=drawn))
    return train, held_out
