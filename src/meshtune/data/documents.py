"""The documents of a recipe: every record of every source is checked once and mixed with the others, then read again on
access.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from meshtune.config.data_options import SourceOptions
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.checking import (
    NO_DIGESTS,
    CheckedSource,
    RunTasks,
    SkippedRecord,
    check_source,
    check_usable,
    open_unchecked,
    run_here,
)
from meshtune.data.conversation import Origin, Sample, add_system
from meshtune.data.mixing import apportion, mix
from meshtune.data.packing import shuffle_order
from meshtune.data.progress import Progress
from meshtune.data.readers.textfiles import SHUFFLE_WINDOW
from meshtune.data.sources import DataSource
from meshtune.data.store import DIGEST_BYTES
from meshtune.errors import UserError, amount
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from meshtune.data.pictures.files import PictureFiles
    from meshtune.data.registry import Registry
    from meshtune.objectives.stages import DatasetType

load_registry = LazyFunction("meshtune.data.registry:load_registry")


SPLIT_STREAM = 0x73706C  # makes draws independent of others with the same seed
WINDOW_STREAM = 0x77696E  # the same for orders of windows
_HASHED = 1 << 16  # digests hashed at a time


class DocumentList(Sequence[Sample]):
    """Samples that are read from their sources on access. Only two small integers per sample are kept in memory.

    `source` [n] is the index of each sample's source in `sources`, `record` [n] its record there. `system`
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

    @functools.cached_property
    def shuffle_windows(self) -> list[np.ndarray]:
        """The ends of the shuffle windows of each source: records that are decoded together, and read in any order."""
        windows = []
        for checked in self.sources:
            records, sizes = checked.records.runs.T
            numbers = (np.cumsum(sizes) - sizes) // SHUFFLE_WINDOW
            windows.append(np.cumsum(records)[np.append(np.diff(numbers) > 0, True)])
        return windows

    def group_by_window(self, order: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """The samples of an `order` with those of each shuffle window together, and the windows in a random order. They
        change places within their source only."""
        for index, ends in enumerate(self.shuffle_windows):
            if len(ends) > 1:
                places = np.flatnonzero(self.source[order] == index)
                samples = order[places]
                rank = shuffle_order(len(ends), seed, (WINDOW_STREAM << 20) + (epoch << 10) + index)
                rank = rank.astype(np.min_scalar_type(len(ends)))  # sorted faster
                windows = np.searchsorted(ends, self.record[samples], side="right")
                order[places] = samples[np.argsort(rank[windows], kind="stable")]
        return order

    def compact(self) -> DocumentList:
        """The samples with only those records that they are made from, for another process."""
        source, record, sources = self.source.copy(), self.record.copy(), list[CheckedSource]()
        for index in np.unique(self.source).tolist():
            chosen = self.source == index
            numbers, record[chosen] = np.unique(self.record[chosen], return_inverse=True)
            source[chosen] = len(sources)
            records = self.sources[index].records.select(numbers)
            empty = {"usable": numbers[:0], "digests": NO_DIGESTS}
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
    data: DataSection,
    *,
    seed: int,
    dataset_type: DatasetType = "documents",
    pictures: PictureFiles | None = None,
    streaming: bool = False,
) -> Documents:
    """The data of a recipe, of whose training records only the first few are read: for data too large to be read twice.
    With `streaming` training records are read in any order.

    Sources are mixed, and records held out, as by `load_documents`; validation records are all checked. Reading a
    malformed training record raises UserError on access.
    """
    skipped: list[SkippedRecord] = []
    train = [
        open_unchecked(source, data.on_bad, seed, dataset_type, pictures, streaming=streaming)
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
    record = np.empty(len(position), np.result_type(*(checked.usable for checked in sources)))
    for index, checked in enumerate(sources):
        chosen = source == index
        record[chosen] = checked.usable[position[chosen]]
    return DocumentList(sources, source.astype(np.min_scalar_type(len(sources))), record)


def _concatenate(sources: list[CheckedSource]) -> DocumentList:
    used = [checked for checked in sources if len(checked.usable)]
    numbers = np.arange(len(used), dtype=np.min_scalar_type(len(used)))
    source = np.repeat(numbers, [len(checked.usable) for checked in used])
    records = [checked.usable for checked in used]
    return DocumentList(used, source, records[0] if len(used) == 1 else np.concatenate(records))


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
