"""The documents of a recipe: every record of every source is checked once and mixed with the others, then read again on
access.

- concat: every source once, in sequence. With weights the total stays the same and each source gets its share of it: a
  source smaller than its share is repeated (whole passes, then a random part), a larger one is subsampled (without
  replacement, in its own order).
- interleave_under: the source of each document is drawn by weight (equal weights by default) and gives its next record,
  until the first source is exhausted. No record appears twice.
- interleave_over: the same until every source is exhausted; one that ends early restarts from its first record.

Weights are relative to each other. Caps apply first: they limit the records of a source, not its share.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from meshtune.config.data_options import SourceOptions
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Conversation, Document, Message, Origin, Sample, map_documents
from meshtune.data.formats import select_format
from meshtune.data.formats.record import (
    FieldNames,
    RecordFormat,
    describe,
    has_pictures,
    passed_over,
    read_record,
    unread_fields,
)
from meshtune.data.progress import Progress
from meshtune.data.readers.textfiles import Records
from meshtune.data.sources import DataSource, open_source
from meshtune.data.store import DIGEST_BYTES, sample_digest
from meshtune.errors import UserError, amount, nearest
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from meshtune.data.pictures.files import PictureFiles
    from meshtune.data.registry import Registry
    from meshtune.objectives.stages import DatasetType

open_pictures = LazyFunction("meshtune.data.pictures.files:open_pictures")
place_pictures = LazyFunction("meshtune.data.formats.pictures:place_pictures")
load_registry = LazyFunction("meshtune.data.registry:load_registry")
STRATEGIES = ("concat", "interleave_under", "interleave_over")
STREAM = 0x6D6978  # makes draws independent of others with the same seed
BLOCK = 1 << 16  # draws at a time


def mix(
    lengths: Sequence[int], weights: Sequence[float | None], strategy: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The source int32 [n] and the position in that source int64 [n] of every document of the mixture.

    A pure function of its arguments. Raises UserError for an unknown strategy, and where some sources have a weight and
    others do not; ValueError for a source without records.
    """
    set_weights = [weight for weight in weights if weight is not None]
    _check_mixture(lengths, weights, strategy)
    if strategy == "concat" and not set_weights:
        source = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return source, np.concatenate([np.arange(length) for length in lengths])
    rng = np.random.default_rng([seed, STREAM])
    share = np.array(set_weights or [1.0] * len(lengths), np.float64)
    share /= share.sum()
    if strategy == "concat":
        return _concat(np.array(lengths), share, rng)
    return _interleave(np.array(lengths), share, rng, until_all=strategy == "interleave_over")


def _check_mixture(lengths: Sequence[int], weights: Sequence[float | None], strategy: str) -> None:
    if strategy not in STRATEGIES:
        fix = f"{nearest(strategy, STRATEGIES)}{', '.join(STRATEGIES)}"
        raise UserError(f"unknown mixing '{strategy}'", where="data.mixing", fix=fix)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"sources to mix need at least one record each, got lengths {list(lengths)}")
    if None in weights and any(weight is not None for weight in weights):
        problem, where = "some sources have a weight and others do not", f"data.train[{weights.index(None)}].weight"
        raise UserError(problem, where=where, fix="give every source a weight, or none of them")


def _concat(lengths: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    counts = np.maximum(apportion(int(lengths.sum()), share), 1)
    parts = [draw(int(length), int(count), rng) for length, count in zip(lengths, counts, strict=True)]
    return np.repeat(np.arange(len(parts), dtype=np.int32), counts), np.concatenate(parts)


def draw(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` indices below `length`, int64: whole passes, then some drawn without replacement, each in order."""
    passes, remainder = divmod(count, length)
    drawn = np.sort(rng.permutation(length)[:remainder])
    return np.concatenate([np.tile(np.arange(length), passes), drawn]).astype(np.int64)


def apportion(total: int, share: np.ndarray) -> np.ndarray:
    """Integers that sum to `total`, in proportion to `share` (which sums to 1), by largest remainders (Hamilton)."""
    exact = total * share
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - counts), kind="stable")
    counts[largest[: total - int(counts.sum())]] += 1
    return counts


def _interleave(
    lengths: np.ndarray, share: np.ndarray, rng: np.random.Generator, *, until_all: bool
) -> tuple[np.ndarray, np.ndarray]:
    blocks: list[np.ndarray] = []
    used = np.zeros(len(lengths), np.int64)
    records: list[np.ndarray] = []
    while True:
        drawn = rng.choice(len(lengths), size=BLOCK, p=share).astype(np.int32)
        record = np.empty(BLOCK, np.int64)
        ends = np.full(len(lengths), BLOCK + 1)  # draws of this block after which each source is exhausted
        for source, length in enumerate(lengths):
            turns = np.flatnonzero(drawn == source)
            record[turns] = (used[source] + np.arange(len(turns))) % length
            remaining = length - used[source]
            if remaining <= 0:
                ends[source] = 0
            elif remaining <= len(turns):
                ends[source] = turns[remaining - 1] + 1
            used[source] += len(turns)
        stop = int(ends.max() if until_all else ends.min())
        blocks.append(drawn[:stop])
        records.append(record[:stop])
        if stop <= BLOCK:
            return np.concatenate(blocks), np.concatenate(records)


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
    records were not checked. `unread` are the names of fields that the format passes over. `pictures` opens those of
    records; None: there must be none.
    """

    source: DataSource
    records: Records
    format: RecordFormat
    fields: FieldNames
    usable: np.ndarray
    digests: np.ndarray = dataclasses.field(default_factory=lambda: _NO_DIGESTS)
    unread: tuple[str, ...] = ()
    pictures: PictureFiles | None = None

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


def check_source(
    source: DataSource,
    on_bad: str,
    seed: int,
    skipped: list[SkippedRecord],
    dataset_type: DatasetType,
    progress: Progress | None = None,
    pictures: PictureFiles | None = None,
) -> CheckedSource:
    """Reads and converts all records of a source, up to its cap, keeping the indices of the usable ones.

    Adds the others to `skipped`, or raises UserError for the first of them, as `on_bad` says; raises it for a source
    without a usable record, and for a file that changed meanwhile.
    """
    checked = _open(source, on_bad, dataset_type, pictures)
    records, total = checked.records, min(len(checked.records), source.cap or len(checked.records))
    report = functools.partial(progress or (lambda *_: None), f"reading {source.path}")
    usable, digests, names, skipped_before = array.array("q"), bytearray(), set[str](), len(skipped)
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
            usable.append(index)
        except UserError as error:
            _refuse_or_skip(error, on_bad, skipped, checked, index)
            digests += bytes(DIGEST_BYTES)
    records.check_unchanged()
    if not usable:
        raise _nothing_usable_error(checked, skipped[skipped_before:])
    report(total, total)
    return dataclasses.replace(
        checked,
        usable=_sample(np.array(usable, np.int64), source.sample, seed),
        digests=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
        unread=tuple(unread_fields(names, checked.fields)),
    )


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
    return CheckedSource(source, records, form, form.resolve(source.columns), np.empty(0, np.int64), pictures=pictures)


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


def add_system(sample: Sample, system: str) -> Sample:
    """The sample with `system` before every conversation that has no system turn."""
    return map_documents(sample, functools.partial(_add_to, system=system))


def _add_to(document: Document, system: str) -> Document:
    if not isinstance(document, Conversation):
        return dataclasses.replace(document, system_prompt=system)
    if any(message.role == "system" for message in document.messages):
        return document
    return dataclasses.replace(document, messages=(Message("system", system), *document.messages))


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
) -> Documents:
    """Reads and checks every record of the sources, then splits and mixes them; a pure function of files and seed.

    Validation given as a share (below 1) or a count (1 and above) is drawn by the seed from the records before they are
    mixed, from each source in proportion, so that a repeated record is never on both sides. At least one record is held
    out. Validation sources are concatenated. `dataset_type` is what the records must be converted to. `progress` is
    called as each source is read. `pictures` opens those of records; without it a record with pictures is malformed.

    Raises UserError at the first malformed record (with `on_bad: error`), for a source without a usable record, for a
    validation share that would leave a source nothing to train on, and as readers, formats and registry do.
    """
    registry = load_registry(data.registry) if data.registry else None
    skipped: list[SkippedRecord] = []

    def check_all(sections: Sequence[SourceSection]) -> list[CheckedSource]:
        sources = (_data_source(section, registry, dataset_type) for section in sections)
        return [
            check_source(source, data.on_bad, seed, skipped, dataset_type, progress, pictures) for source in sources
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
    registry = load_registry(data.registry) if data.registry else None
    skipped: list[SkippedRecord] = []
    train = [
        open_unchecked(_data_source(section, registry, dataset_type), data.on_bad, seed, dataset_type, pictures)
        for section in data.train
    ]
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        sources = [_data_source(section, registry, dataset_type) for section in data.validation]
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
