"""The documents of a recipe: every record of every source checked once, then read again when it is asked for."""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from meshtune.config.data import DataSection, SourceSection
from meshtune.data.conversation import Origin, Sample
from meshtune.data.formats import choose
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.record import shown
from meshtune.data.mixing import apportion, draw, mix
from meshtune.data.readers.records import Records
from meshtune.data.registry import Registry
from meshtune.data.sources import Source, open_source
from meshtune.errors import UserError

LOOKED_AT = 20  # readable records that a format is recognised from
LOOKED_THROUGH = 1000  # records read, at most, to find them among bad ones
SAMPLE_STREAM, SPLIT_STREAM = 0x736D70, 0x73706C  # keep the draws here apart from others made with the same seed


@dataclasses.dataclass(frozen=True)
class Skip:
    """A record left out because of `on_bad: skip`, and why."""

    origin: Origin
    reason: str


@dataclasses.dataclass(frozen=True)
class Checked:
    """A source whose records have all been read once; `usable` [n] int64 are the numbers of those to learn from."""

    source: Source
    records: Records
    format: Format
    fields: Fields
    usable: np.ndarray

    def document(self, record: int) -> Sample:
        raw = self.records[record]
        return self.format.convert(raw, self.fields, self.source.tags, self.records.origin(record))


class DocumentList(Sequence[Sample]):
    """Documents read from their sources when asked for: nothing is held but two numbers each."""

    def __init__(self, sources: Sequence[Checked], source: np.ndarray, record: np.ndarray):
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
        return self.sources[self.source[index]].document(int(self.record[index]))

    def origin(self, index: int) -> Origin:
        """Where a document comes from, without reading it."""
        return self.sources[self.source[index]].records.origin(int(self.record[index]))


@dataclasses.dataclass(frozen=True)
class Documents:
    """What there is to learn from and to validate on; `formats` names the format each source was read as."""

    train: DocumentList
    validation: DocumentList | None
    skipped: list[Skip]
    formats: dict[str, str]


def documents(data: DataSection, *, seed: int, learns: str = "documents") -> Documents:
    """Reads and checks every record of the sources, then mixes and splits them; the same for the same files and seed.

    Validation as a share or number is drawn by the seed from the records before they are mixed, from each source in
    proportion, so that a repeated record is never on both sides. A number below 1 is a share, 1 and above a count; at
    least one record is held out. Validation sources are concatenated.

    `learns` says what the records are to be: documents, pairs or labelled (see formats.KINDS).

    Raises UserError at the first bad record (with `on_bad: error`), for a source with no usable record, for a
    validation share that would leave a source nothing to train on, and as readers, formats and registry do.
    """
    registry = Registry.load(data.registry) if data.registry else None
    skipped: list[Skip] = []

    def read(sections: Sequence[SourceSection]) -> list[Checked]:
        return [
            _check(_describe(section, registry, learns), data.on_bad, seed, skipped, learns) for section in sections
        ]

    train = read(data.train)
    validation = None
    if isinstance(data.validation, list):
        for index, section in enumerate(data.validation):
            if section.weight is not None:
                where = f"data.validation[{index}].weight"
                raise UserError("validation sources have no weights", where=where, fix="use cap instead")
        validation = _concatenated(read(data.validation))
    elif data.validation is not None:
        train, held_out = _split(train, data.validation, seed)
        validation = _concatenated(held_out)
    source, row = mix([len(one.usable) for one in train], [one.source.weight for one in train], data.mixing, seed)
    record = np.empty(len(row), np.int64)
    for index, one in enumerate(train):
        record[source == index] = one.usable[row[source == index]]
    every = [*train, *(validation.sources if validation else [])]
    return Documents(
        DocumentList(train, source, record), validation, skipped, {one.source.path: one.format.name for one in every}
    )


def unchecked(data: DataSection, *, seed: int) -> DocumentList:
    """The training documents of a recipe, without reading any but the first few: for data too large to be read twice.

    Sources are concatenated. Reading a bad record raises UserError when its turn comes.
    """
    registry = Registry.load(data.registry) if data.registry else None
    found = []
    for section in data.train:
        source = _describe(section, registry, "documents")
        records = open_source(source)
        form = _format(source, records, data.on_bad, "documents")
        numbers = np.arange(min(len(records), source.cap or len(records)), dtype=np.int64)
        if source.sample is not None:
            numbers = numbers[draw(len(numbers), source.sample, np.random.default_rng([seed, SAMPLE_STREAM]))]
        found.append(Checked(source, records, form, form.resolve(source.columns), numbers))
    return _concatenated(found)


def _describe(section: SourceSection, registry: Registry | None, learns: str) -> Source:
    if section.name is not None:
        assert registry is not None, "DataSection refuses a name without a registry"
        return registry.source(section, learns)
    return Source(
        path=section.path or "",
        format=section.format,
        columns=section.columns,
        tags=section.tags,
        subset=section.subset,
        split=section.split,
        revision=section.revision,
        weight=section.weight,
        cap=section.cap,
    )


def _check(source: Source, on_bad: str, seed: int, skipped: list[Skip], learns: str) -> Checked:
    """One pass over all records of a source (up to its cap), each converted and let go again."""
    records = open_source(source)
    form = _format(source, records, on_bad, learns)
    fields, convert, tags = form.resolve(source.columns), form.convert, source.tags
    usable, bad = array.array("q"), 0
    for index, record in enumerate(records.sweep()):
        if len(usable) == source.cap:
            break
        try:
            if isinstance(record, UserError):
                raise record
            origin = records.origin(index)
            if not isinstance(record, dict):
                fix = 'write it as {"field": value}'
                raise UserError(f"the record is no object, found {shown(record)}", where=str(origin), fix=fix)
            convert(record, fields, tags, origin)
        except UserError as error:
            if on_bad == "error":
                raise _located(error, records, index, form) from None
            bad += 1
            skipped.append(Skip(records.origin(index), _reason(error, records.origin(index))))
        else:
            usable.append(index)
    if not usable:
        example = f", the first because: {skipped[-bad].reason}" if bad else ""
        raise UserError(
            f"no record of this source can be used as format {form.name}: all {bad} were skipped{example}",
            where=source.path,
            fix="mend the records, or name another format",
        )
    numbers = np.array(usable, np.int64)
    if source.sample is not None:
        numbers = numbers[draw(len(numbers), source.sample, np.random.default_rng([seed, SAMPLE_STREAM]))]
    return Checked(source, records, form, fields, numbers)


def _format(source: Source, records: Records, on_bad: str, learns: str) -> Format:
    if source.format != "auto":
        return choose(source.format, [], source.path, source.columns, source.tags, learns)
    first: list[Any] = []
    for index, record in enumerate(itertools.islice(records.sweep(), LOOKED_THROUGH)):
        if isinstance(record, UserError):
            if on_bad == "error":
                raise _located(record, records, index, None)
        elif isinstance(record, dict):
            first.append(record)
        if len(first) == LOOKED_AT:
            break
    return choose("auto", first, source.path, source.columns, source.tags, learns)


def _located(error: UserError, records: Records, index: int, form: Format | None) -> UserError:
    """The error with its line number, the format the record was read as, and the way around it."""
    origin = str(records.origin(index))
    where = error.where or origin
    if where.startswith(origin):
        where = f"{records.where(index)}{where.removeprefix(origin)}"
        if form is not None:
            where += f" (format {form.name})"
    elif origin not in where:
        where = f"{where} (record {records.origin(index).record})"
    around = "on_bad: skip leaves such records out"
    return UserError(error.what, where=where, fix=f"{error.fix}; or {around}" if error.fix else around)


def _reason(error: UserError, origin: Origin) -> str:
    """A skip's reason in one line: what is wrong and in which field, the origin being said already."""
    place = (error.where or "").removeprefix(str(origin)).removeprefix(", ")
    return f"{place}: {error.what}" if place else error.what


def _concatenated(sources: list[Checked]) -> DocumentList:
    kept = [one for one in sources if len(one.usable)]
    source = np.repeat(np.arange(len(kept), dtype=np.int32), [len(one.usable) for one in kept])
    return DocumentList(kept, source, np.concatenate([one.usable for one in kept]))


def _split(sources: list[Checked], held_out: float, seed: int) -> tuple[list[Checked], list[Checked]]:
    """The sources without, and with only, the records held out; each record goes to one side with all its repeats."""
    different = [np.unique(one.usable) for one in sources]
    sizes = np.array([len(numbers) for numbers in different])
    total = int(sizes.sum())
    count = max(1, round(held_out * total)) if held_out < 1 else int(held_out)
    counts = np.minimum(apportion(count, sizes / total), sizes - 1)
    for index in np.argsort(-sizes, kind="stable"):  # what a small source could not give, a large one does
        counts[index] += min(count - int(counts.sum()), int(sizes[index] - 1 - counts[index]))
    if counts.sum() < count:
        most = f"hold out at most {total - len(sources)}, " if total > len(sources) else ""
        asked = f"a share of {held_out:g}" if held_out < 1 else f"{count}"
        raise UserError(
            f"holding out {asked} of {total} records ({count}) would leave a source without training data",
            where="data.validation",
            fix=f"{most}add records, or give validation files of their own",
        )
    rng = np.random.default_rng([seed, SPLIT_STREAM])
    kept, taken = [], []
    for one, numbers, size in zip(sources, different, counts, strict=True):
        out = np.sort(rng.permutation(numbers)[:size])
        kept.append(dataclasses.replace(one, usable=one.usable[~np.isin(one.usable, out)]))
        taken.append(dataclasses.replace(one, usable=out))
    return kept, taken
