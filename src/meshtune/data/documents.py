"""The documents of a recipe: every record of every source is checked once, then read again on access."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from meshtune.config.data import DataSection, SourceSection
from meshtune.config.data_options import SourceOptions
from meshtune.data.checked_source import CheckedSource, SkippedRecord, check_source, check_usable, open_unchecked
from meshtune.data.conversation import Origin, Sample
from meshtune.data.mixing import apportion, mix
from meshtune.data.progress import Progress
from meshtune.data.registry import Registry
from meshtune.data.sources import DataSource
from meshtune.data.store import DIGEST_BYTES
from meshtune.data.system_prompt import add_system
from meshtune.errors import UserError, amount

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType

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
    data: DataSection, *, seed: int, dataset_type: DatasetType = "documents", progress: Progress | None = None
) -> Documents:
    """Reads and checks every record of the sources, then splits and mixes them; a pure function of files and seed.

    Validation given as a share (below 1) or a count (1 and above) is drawn by the seed from the records before they are
    mixed, from each source in proportion, so that a repeated record is never on both sides. At least one record is held
    out. Validation sources are concatenated. `dataset_type` is what the records must be converted to. `progress` is
    called as each source is read.

    Raises UserError at the first malformed record (with `on_bad: error`), for a source without a usable record, for a
    validation share that would leave a source nothing to train on, and as readers, formats and registry do.
    """
    registry = Registry.load(data.registry) if data.registry else None
    skipped: list[SkippedRecord] = []

    def check_all(sections: Sequence[SourceSection]) -> list[CheckedSource]:
        sources = (_data_source(section, registry, dataset_type) for section in sections)
        return [check_source(source, data.on_bad, seed, skipped, dataset_type, progress) for source in sources]

    train = check_all(data.train)
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        validation = _concatenate(check_all(data.validation))
    elif data.validation is not None:
        train, held_out = _hold_out(train, data.validation, seed)
        validation = _concatenate(held_out)
    return _documents(_mix_sources(train, data.mixing, seed), validation, skipped)


def open_documents(data: DataSection, *, seed: int, dataset_type: DatasetType = "documents") -> Documents:
    """The data of a recipe, of whose training records only the first few are read: for data too large to be read twice.

    Sources are mixed, and records held out, as by `load_documents`; validation records are all checked. Reading a
    malformed training record raises UserError on access.
    """
    registry = Registry.load(data.registry) if data.registry else None
    skipped: list[SkippedRecord] = []
    train = [
        open_unchecked(_data_source(section, registry, dataset_type), data.on_bad, seed, dataset_type)
        for section in data.train
    ]
    validation = None
    if isinstance(data.validation, list):
        _check_unweighted(data.validation)
        sources = [_data_source(section, registry, dataset_type) for section in data.validation]
        validation = _concatenate(
            [check_source(source, data.on_bad, seed, skipped, dataset_type) for source in sources]
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
