"""The documents of a recipe: every record of every source is checked once, then read again on access."""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from meshtune.config.data import DataSection, SourceSection
from meshtune.config.data_options import SourceOptions
from meshtune.data.conversation import Origin, Sample
from meshtune.data.formats import select_format
from meshtune.data.formats.record import describe
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat
from meshtune.data.mixing import apportion, draw, mix
from meshtune.data.readers.records import Records
from meshtune.data.registry import Registry
from meshtune.data.sources import DataSource, open_source
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType

DETECTION_RECORDS = 20  # readable records that a format is detected from
DETECTION_LIMIT = 1000  # records read at most to find them among malformed ones
SAMPLE_STREAM, SPLIT_STREAM = 0x736D70, 0x73706C  # make draws independent of others with the same seed


@dataclasses.dataclass(frozen=True)
class SkippedRecord:
    """A record that was left out, and why."""

    origin: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CheckedSource:
    """A source whose records were all read once. `usable` int64 [n] are the indices of those to train on."""

    source: DataSource
    records: Records
    format: RecordFormat
    fields: FieldNames
    usable: np.ndarray

    def sample(self, index: int) -> Sample:
        """Reads and converts the record at `index`."""
        return _convert(self.records[index], self, self.records.origin(index))


def _convert(record: object, checked: CheckedSource, origin: Origin) -> Sample:
    if not isinstance(record, dict):
        problem = f"the record is not an object, found {describe(record)}"
        raise UserError(problem, where=str(origin), fix='write it as {"field": value}')
    named: Record = record
    return checked.format.convert(named, checked.fields, checked.source.tags, origin)


class DocumentList(Sequence[Sample]):
    """Samples that are read from their sources on access. Only two integers per sample are kept in memory.

    `source` int32 [n] is the index of each sample's source in `sources`, `record` int64 [n] its record there.
    """

    def __init__(self, sources: Sequence[CheckedSource], source: np.ndarray, record: np.ndarray):
        self.sources, self.source, self.record = list(sources), source, record

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> DocumentList: ...

    def __getitem__(self, index: int | slice) -> Sample | DocumentList:
        if isinstance(index, slice):
            return DocumentList(self.sources, self.source[index], self.record[index])
        return self.sources[self.source[index]].sample(int(self.record[index]))

    def origin(self, index: int) -> Origin:
        """The origin of a sample, without reading it."""
        return self.sources[self.source[index]].records.origin(int(self.record[index]))


@dataclasses.dataclass(frozen=True)
class Documents:
    """The training and validation data of a recipe. `formats` maps the path of each source to its format."""

    train: DocumentList
    validation: DocumentList | None
    skipped: list[SkippedRecord]
    formats: dict[str, str]


def load_documents(data: DataSection, *, seed: int, dataset_type: DatasetType = "documents") -> Documents:
    """Reads and checks every record of the sources, then splits and mixes them; a pure function of files and seed.

    Validation given as a share (below 1) or a count (1 and above) is drawn by the seed from the records before they are
    mixed, from each source in proportion, so that a repeated record is never on both sides. At least one record is held
    out. Validation sources are concatenated. `dataset_type` is what the records must be converted to.

    Raises UserError at the first malformed record (with `on_bad: error`), for a source without a usable record, for a
    validation share that would leave a source nothing to train on, and as readers, formats and registry do.
    """
    registry = Registry.load(data.registry) if data.registry else None
    skipped: list[SkippedRecord] = []

    def check_all(sections: Sequence[SourceSection]) -> list[CheckedSource]:
        sources = (_data_source(section, registry, dataset_type) for section in sections)
        return [_check(source, data.on_bad, seed, skipped, dataset_type) for source in sources]

    train = check_all(data.train)
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        validation = _concatenate(check_all(data.validation))
    elif data.validation is not None:
        train, held_out = _hold_out(train, data.validation, seed)
        validation = _concatenate(held_out)
    formats = {
        checked.source.path: checked.format.name for checked in [*train, *(validation.sources if validation else [])]
    }
    return Documents(_mixed(train, data.mixing, seed), validation, skipped, formats)


def open_documents(data: DataSection, *, seed: int, dataset_type: DatasetType = "documents") -> Documents:
    """The data of a recipe, of whose training records only the first few are read: for data too large to be read twice.

    Sources are mixed, and records held out, as by `load_documents`; validation records are all checked. Reading a
    malformed training record raises UserError on access.
    """
    registry = Registry.load(data.registry) if data.registry else None
    skipped: list[SkippedRecord] = []
    train = _open_all(data, registry, seed, dataset_type)
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        sources = [_data_source(section, registry, dataset_type) for section in data.validation]
        validation = _concatenate([_check(source, data.on_bad, seed, skipped, dataset_type) for source in sources])
    elif data.validation is not None:
        train, held_out = _hold_out(train, data.validation, seed)
        readable = [_check_chosen(checked, data.on_bad, skipped) for checked in held_out]
        if not any(len(checked.usable) for checked in readable):
            problem = f"none of the {len(skipped)} records held out can be used, the first because: {skipped[0].reason}"
            raise UserError(problem, where="data.validation", fix="hold out more, or correct the records")
        validation = _concatenate(readable)
    formats = {
        checked.source.path: checked.format.name for checked in [*train, *(validation.sources if validation else [])]
    }
    return Documents(_mixed(train, data.mixing, seed), validation, skipped, formats)


def _open_all(
    data: DataSection, registry: Registry | None, seed: int, dataset_type: DatasetType
) -> list[CheckedSource]:
    """The training sources with all their records, up to their caps, as usable."""
    opened = []
    for section in data.train:
        source = _data_source(section, registry, dataset_type)
        records = open_source(source)
        form = _select_format(source, records, data.on_bad, dataset_type)
        indices = np.arange(min(len(records), source.cap or len(records)), dtype=np.int64)
        indices = _sample(indices, source.sample, seed)
        opened.append(CheckedSource(source, records, form, form.resolve(source.columns), indices))
    return opened


def _check_chosen(checked: CheckedSource, on_bad: str, skipped: list[SkippedRecord]) -> CheckedSource:
    """The source with those of its usable records that can be converted."""
    readable: list[int] = []
    for index in checked.usable.tolist():
        try:
            checked.sample(index)
        except UserError as error:
            if on_bad == "error":
                raise _with_location(error, checked.records, index, checked.format) from None
            origin = checked.records.origin(index)
            skipped.append(SkippedRecord(str(origin), _one_line(error, origin)))
        else:
            readable.append(index)
    return dataclasses.replace(checked, usable=np.array(readable, np.int64))


def _check_unweighted(validation: Sequence[SourceSection]) -> None:
    for index, section in enumerate(validation):
        if section.weight is not None:
            where = f"data.validation[{index}].weight"
            raise UserError("validation sources have no weights", where=where, fix="use cap instead")


def _data_source(section: SourceSection, registry: Registry | None, dataset_type: DatasetType) -> DataSource:
    if section.name is not None:
        assert registry is not None, "DataSection refuses a name without a registry"
        return registry.source(section, dataset_type)
    options = {field.name: getattr(section, field.name) for field in dataclasses.fields(SourceOptions)}
    return DataSource(path=section.path or "", **options)


def _check(
    source: DataSource, on_bad: str, seed: int, skipped: list[SkippedRecord], dataset_type: DatasetType
) -> CheckedSource:
    """Reads and converts all records of a source, up to its cap, keeping the indices of the usable ones."""
    records = open_source(source)
    form = _select_format(source, records, on_bad, dataset_type)
    checked = CheckedSource(source, records, form, form.resolve(source.columns), np.empty(0, np.int64))
    usable, malformed = array.array("q"), 0
    for index, record in enumerate(records.sweep()):
        if len(usable) == source.cap:
            break
        try:
            if isinstance(record, UserError):
                raise record
            _convert(record, checked, records.origin(index))
        except UserError as error:
            if on_bad == "error":
                raise _with_location(error, records, index, form) from None
            malformed += 1
            origin = records.origin(index)
            skipped.append(SkippedRecord(str(origin), _one_line(error, origin)))
        else:
            usable.append(index)
    if not usable:
        example = f", the first because: {skipped[-malformed].reason}" if malformed else ""
        raise UserError(
            f"no record of this source can be used as format {form.name}: all {malformed} were skipped{example}",
            where=source.path,
            fix="correct the records, or name another format",
        )
    return dataclasses.replace(checked, usable=_sample(np.array(usable, np.int64), source.sample, seed))


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
    origin = str(records.origin(index))
    where = error.where or origin
    if where.startswith(origin):
        where = f"{records.where(index)}{where.removeprefix(origin)}"
        if form is not None:
            where += f" (format {form.name})"
    elif origin not in where:
        where = f"{where} (record {records.origin(index).record})"
    remedy = "on_bad: skip leaves such records out"
    return UserError(error.what, where=where, fix=f"{error.fix}; or {remedy}" if error.fix else remedy)


def _one_line(error: UserError, origin: Origin) -> str:
    """What is wrong and in which field, without the origin."""
    field = (error.where or "").removeprefix(str(origin)).removeprefix(", ")
    return f"{field}: {error.what}" if field else error.what


def _mixed(sources: list[CheckedSource], mixing: str, seed: int) -> DocumentList:
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
        raise UserError(
            f"holding out {requested} of {total} records ({count}) would leave a source without training data",
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
