"""One source of a recipe whose records are checked in one pass, which also makes a digest of each."""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

import numpy as np

from meshtune.data.conversation import Origin, Sample
from meshtune.data.formats import select_format
from meshtune.data.formats.meanings import passed_over, read_record, unread_fields
from meshtune.data.formats.record import describe
from meshtune.data.formats.record_format import FieldNames, RecordFormat
from meshtune.data.mixing import draw
from meshtune.data.progress import Progress
from meshtune.data.readers.records import Records
from meshtune.data.sources import DataSource, open_source
from meshtune.data.store import DIGEST_BYTES, sample_digest
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType

DETECTION_RECORDS = 20  # readable records that a format is detected from
DETECTION_LIMIT = 1000  # records read at most to find them among malformed ones
SAMPLE_STREAM = 0x736D70  # makes draws independent of others with the same seed
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
    records were not checked. `unread` are the names of fields that the format passes over.
    """

    source: DataSource
    records: Records
    format: RecordFormat
    fields: FieldNames
    usable: np.ndarray
    digests: np.ndarray = dataclasses.field(default_factory=lambda: _NO_DIGESTS)
    unread: tuple[str, ...] = ()

    def sample(self, index: int) -> Sample:
        """Reads and converts the record at `index`."""
        return _convert(self.records[index], self, self.records.origin(index))


def _convert(record: object, checked: CheckedSource, origin: Origin) -> Sample:
    if not isinstance(record, dict):
        raise _not_an_object_error(record, origin)
    return read_record(checked.format, record, checked.fields, checked.source.tags, origin)


def _not_an_object_error(record: object, origin: Origin) -> UserError:
    problem = f"the record is not an object, found {describe(record)}"
    return UserError(problem, where=str(origin), fix='write it as {"field": value}')


def open_unchecked(source: DataSource, on_bad: str, seed: int, dataset_type: DatasetType) -> CheckedSource:
    """The source with all its records, up to its cap, as usable. Reads those that its format is detected from."""
    checked = _open(source, on_bad, dataset_type)
    indices = np.arange(min(len(checked.records), source.cap or len(checked.records)), dtype=np.int64)
    first = itertools.islice(checked.records.sweep(), DETECTION_RECORDS)
    names = {name for record in first if isinstance(record, dict) for name in passed_over(record, source.tags)}
    unread = tuple(unread_fields(names, checked.fields))
    return dataclasses.replace(checked, usable=_sample(indices, source.sample, seed), unread=unread)


def check_source(
    source: DataSource,
    on_bad: str,
    seed: int,
    skipped: list[SkippedRecord],
    dataset_type: DatasetType,
    progress: Progress | None = None,
) -> CheckedSource:
    """Reads and converts all records of a source, up to its cap, keeping the indices of the usable ones.

    Adds the others to `skipped`, or raises UserError for the first of them, as `on_bad` says; raises it for a source
    without a usable record, and for a file that changed meanwhile.
    """
    checked = _open(source, on_bad, dataset_type)
    records, total = checked.records, min(len(checked.records), source.cap or len(checked.records))
    report = functools.partial(progress or (lambda *_: None), f"reading {source.path}")
    usable, malformed, digests, names = array.array("q"), 0, bytearray(), set[str]()
    for index, record in enumerate(records.sweep()):
        if len(usable) == source.cap:
            break
        if index % 256 == 0:
            report(min(index, total), total)
        try:
            if isinstance(record, UserError):
                raise record
            digests += sample_digest(_convert(record, checked, records.origin(index)))
            names |= passed_over(record, source.tags)  # pyright: ignore[reportArgumentType] - an object, since it was converted
        except UserError as error:
            _refuse_or_skip(error, on_bad, skipped, checked, index)
            malformed += 1
            digests += bytes(DIGEST_BYTES)
        else:
            usable.append(index)
    records.check_unchanged()
    if not usable:
        raise _nothing_usable_error(checked, malformed, skipped)
    report(total, total)
    return dataclasses.replace(
        checked,
        usable=_sample(np.array(usable, np.int64), source.sample, seed),
        digests=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
        unread=tuple(unread_fields(names, checked.fields)),
    )


def _nothing_usable_error(checked: CheckedSource, malformed: int, skipped: list[SkippedRecord]) -> UserError:
    example = f", the first because: {skipped[-malformed].reason}" if malformed else ""
    problem = f"no record of this source can be used as format {checked.format.name}: "
    problem += f"{'the only one was' if malformed == 1 else f'all {malformed:,} were'} skipped{example}"
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


def _open(source: DataSource, on_bad: str, dataset_type: DatasetType) -> CheckedSource:
    records = open_source(source)
    form = _select_format(source, records, on_bad, dataset_type)
    return CheckedSource(source, records, form, form.resolve(source.columns), np.empty(0, np.int64))


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
