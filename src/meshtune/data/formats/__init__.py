"""The data formats, and detection of the one that records have. Adding a format is a module and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from meshtune.data.formats import (
    alpaca,
    hermes,
    labelled,
    messages,
    preference,
    prompt_completion,
    sharegpt,
    stanford_alpaca,
    text,
    xlam,
)
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat
from meshtune.errors import UserError, nearest

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType

DOCUMENT_FORMATS: dict[str, RecordFormat] = {
    module.FORMAT.name: module.FORMAT
    for module in (alpaca, sharegpt, messages, prompt_completion, text, stanford_alpaca, hermes, xlam)
}

FORMATS_BY_TYPE: dict[DatasetType, dict[str, RecordFormat]] = {
    "documents": DOCUMENT_FORMATS,
    "pairs": {candidate.name: candidate for candidate in preference.FORMATS},
    "labelled": {candidate.name: candidate for candidate in labelled.FORMATS},
}
EXAMPLE_STAGE: dict[DatasetType, str] = {"documents": "sft", "pairs": "dpo", "labelled": "kto"}


def select_format(
    name: str,
    records: Sequence[object],
    where: str,
    columns: FieldNames | None = None,
    tags: Mapping[str, str] | None = None,
    dataset_type: DatasetType = "documents",
) -> RecordFormat:
    """The format called `name`, or for "auto" the one that the first `records` of the source `where` fit.

    Raises UserError for an unknown name, column or tag, and for "auto" where no format fits, where several do, or where
    the records hold preferences (chosen and rejected, or a label) and `dataset_type` is documents.
    """
    columns, tags = columns or {}, tags or {}
    candidates = _candidates(name, columns, tags, where, dataset_type)
    if name != "auto":
        return candidates[0]
    objects = [record for record in records if isinstance(record, dict)]
    if not objects:
        fix = 'write records as {"field": value}'
        raise UserError("the first records are not objects, so no format fits", where=where, fix=fix)
    if dataset_type == "documents":
        _refuse_preferences(objects, where)
    scores = {
        candidate: max(candidate.detect(record, candidate.resolve(columns), tags) for record in objects)
        for candidate in candidates
    }
    best = max(scores.values())
    fitting = [candidate for candidate, score in scores.items() if score == best]
    names = ", ".join(dict.fromkeys(key for record in objects for key in record)) or "none"
    if best == 0:
        expected = "\n".join(f"  {candidate.name}: {candidate.expects}" for candidate in candidates)
        raise UserError(
            f"no format fits the records; their fields are: {names}\n{expected}"
            + _stage_hint(objects, columns, tags, dataset_type),
            where=where,
            fix="name the format and, where fields have other names, columns: {the format's field: the record's}",
        )
    if len(fitting) > 1:
        listed = ", ".join(candidate.name for candidate in fitting)
        raise UserError(
            f"the records fit more than one format: {listed}; their fields are: {names}",
            where=where,
            fix=f"name the one you mean, e.g. format: {fitting[0].name}",
        )
    return fitting[0]


def _stage_hint(
    records: Sequence[Record], columns: FieldNames, tags: Mapping[str, str], dataset_type: DatasetType
) -> str:
    """A line that names a stage whose formats fit the records, if there is one."""
    for suitable, formats in FORMATS_BY_TYPE.items():
        if suitable != dataset_type and _any_fits(formats.values(), records, columns, tags):
            return f"\n(they would fit stage {EXAMPLE_STAGE[suitable]})"
    return ""


def _any_fits(
    formats: Iterable[RecordFormat], records: Sequence[Record], columns: FieldNames, tags: Mapping[str, str]
) -> bool:
    candidates = [candidate for candidate in formats if all(map(candidate.has_column, columns))]
    return any(
        candidate.detect(record, candidate.resolve(columns), tags) == 2
        for candidate in candidates
        for record in records
    )


def _candidates(
    name: str, columns: FieldNames, tags: Mapping[str, str], where: str, dataset_type: DatasetType
) -> list[RecordFormat]:
    """The named format, or all that `columns` and `tags` do not rule out."""
    known = FORMATS_BY_TYPE[dataset_type]
    if name != "auto" and name not in known:
        elsewhere = any(name in formats for formats in FORMATS_BY_TYPE.values())
        problem = f"format '{name}' does not hold {dataset_type}" if elsewhere else f"unknown format '{name}'"
        raise UserError(problem, where=where, fix=f"{nearest(name, known)}known: {', '.join(['auto', *known])}")
    formats = list(known.values()) if name == "auto" else [known[name]]
    owner = "any format" if name == "auto" else f"format {name}"
    known_columns = list(dict.fromkeys(key for form in formats for key in (*form.fields, *form.aliases)))
    known_tags = list(dict.fromkeys(key for form in formats for key in form.tags))
    _check_keys(columns, known_columns, "columns", owner, where)
    _check_keys(tags, known_tags, "tags", owner, where)
    fitting = [form for form in formats if all(map(form.has_column, columns)) and all(tag in form.tags for tag in tags)]
    if not fitting:
        keys = ", ".join([*columns, *tags])
        raise UserError(f"no format has all of these columns and tags: {keys}", where=where, fix="name the format")
    return fitting


def _check_keys(keys: Iterable[str], known: Sequence[str], section: str, owner: str, where: str) -> None:
    for key in keys:
        if key not in known:
            listed = f"known: {', '.join(known)}" if known else f"{owner} has none"
            raise UserError(
                f"'{key}' is not one of the {section} of {owner}",
                where=f"{where}, {section}",
                fix=f"{nearest(key, known)}{listed}",
            )


def _refuse_preferences(records: Sequence[Record], where: str) -> None:
    first = records[0]
    if "chosen" in first and "rejected" in first:
        raise UserError(
            "these are preference data (chosen and rejected), which supervised tuning does not train on",
            where=where,
            fix="set stage: dpo (or rm, orpo, simpo, cpo); or, to train on the chosen answers, make records that hold "
            "them, or name a format whose columns are texts, e.g. format: text, columns: {text: chosen}",
        )
    if isinstance(first.get("label"), bool) and any(isinstance(value, list) for value in first.values()):
        raise UserError(
            "these are preference data (a true/false label of each conversation), and supervised tuning would train on "
            "the answers labelled false too",
            where=where,
            fix="set stage: kto; or remove the records labelled false; or name the format, to train on every answer "
            "whatever its label",
        )
