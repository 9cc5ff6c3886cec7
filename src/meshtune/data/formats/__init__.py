"""The data formats, and detection of the one that records have. Adding a format is a module and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from meshtune.data.formats import (
    alpaca,
    hermes,
    hints,
    labelled,
    messages,
    preference,
    prompt_completion,
    sharegpt,
    stanford_alpaca,
    text,
    xlam,
)
from meshtune.data.formats.meanings import FIELDS
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
        missing = candidates[0].missing(columns)
        if missing:
            listed = ", ".join(missing)
            problem = f"format {name} cannot do without {listed}, which columns says is not to be read"
            raise UserError(problem, where=f"{where}, columns", fix="name the field that holds it, or another format")
        return candidates[0]
    objects = [record for record in records if isinstance(record, dict)]
    if not objects:
        fix = 'write records as {"field": value}'
        raise UserError("the first records are not objects, so no format fits", where=where, fix=fix)
    if dataset_type == "documents":
        _refuse_preferences(objects, columns, where)
    fitting, score = _best_fitting(objects, candidates, columns, tags)
    names = ", ".join(dict.fromkeys(str(key) for record in objects for key in record)) or "none"
    if score == 0:
        expected = "\n".join(f"  {candidate.name}: {candidate.expects}" for candidate in candidates)
        fix = "name the format and, where fields have other names, columns: {the format's field: the record's}"
        line = hints.columns_line(objects, {candidate.name: candidate for candidate in candidates}, where)
        raise UserError(
            f"no format fits the records; their fields are: {names}\n{expected}"
            + _stage_hint(objects, columns, tags, dataset_type),
            where=where,
            fix=f"{line}; or {fix}" if line else fix,
        )
    if len(fitting) > 1:
        listed = ", ".join(candidate.name for candidate in fitting)
        raise UserError(
            f"the records fit more than one format: {listed}; their fields are: {names}",
            where=where,
            fix=hints.name_one(objects, fitting, columns, tags),
        )
    return fitting[0]


def _best_fitting(
    records: Sequence[Record], candidates: Iterable[RecordFormat], columns: FieldNames, tags: Mapping[str, str]
) -> tuple[list[RecordFormat], int]:
    """The formats that fit best, and how well: 0 not, 1 possibly, 2 certainly."""
    scores = {
        candidate: max(candidate.detect(record, candidate.resolve(columns), tags) for record in records)
        for candidate in candidates
    }
    best = max(scores.values(), default=0)
    return [candidate for candidate, score in scores.items() if score == best], best


def _stage_hint(
    records: Sequence[Record], columns: FieldNames, tags: Mapping[str, str], dataset_type: DatasetType
) -> str:
    """A line that names a stage under which the records are read, if there is one."""
    for suitable, formats in FORMATS_BY_TYPE.items():
        if suitable == dataset_type or (suitable == "documents" and _holds_preferences(records, columns)):
            continue
        candidates = [form for form in formats.values() if form.accepts(columns)]
        fitting, score = _best_fitting(records, candidates, columns, tags)
        if score == 2 and len(fitting) == 1 and hints.first_problem(fitting[0], records, columns, tags) is None:
            return f"\n(they would fit stage {EXAMPLE_STAGE[suitable]})"
    return ""


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
    anywhere = [key for kinds in FORMATS_BY_TYPE.values() for form in kinds.values() for key in form.fields]
    left_out = [key for key, value in columns.items() if value is None and key not in anywhere]
    known_tags = list(dict.fromkeys(key for form in formats for key in form.tags))
    _check_keys([key for key, value in columns.items() if value is not None], known_columns, "columns", owner, where)
    _check_keys(left_out, [*known_columns, *FIELDS], "columns", owner, where)
    _check_keys(tags, known_tags, "tags", owner, where)
    fitting = [
        form for form in formats if (form.accepts(columns) or name != "auto") and all(tag in form.tags for tag in tags)
    ]
    if not fitting:
        keys = ", ".join([*columns, *tags])
        problem = f"no format has all of these columns and tags: {keys}"
        raise UserError(problem, where=where, fix="leave those out that the format of the records does not have")
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


def _holds_preferences(records: Sequence[Record], columns: FieldNames) -> str:
    """What of the first record says that it holds preferences: its answers, its label, or nothing."""
    first = records[0]
    if "chosen" in first and "rejected" in first:
        return "answers"
    if columns.get("label", "label") is None or not isinstance(first.get("label"), bool):
        return ""
    labelled_formats = [form for form in FORMATS_BY_TYPE["labelled"].values() if form.accepts(columns)]
    return "label" if _best_fitting([first], labelled_formats, columns, {})[1] == 2 else ""


def _refuse_preferences(records: Sequence[Record], columns: FieldNames, where: str) -> None:
    evidence = _holds_preferences(records, columns)
    if evidence == "answers":
        line = hints.chosen_line(records, DOCUMENT_FORMATS)
        raise UserError(
            "these are preference data (chosen and rejected), which supervised tuning does not train on",
            where=where,
            fix="set stage: dpo (or rm, orpo, simpo, cpo); or, to train on the chosen answers, "
            + (line or "make records that hold them"),
        )
    if evidence == "label":
        raise UserError(
            "these are preference data (a true/false label of each answer), and supervised tuning would train on "
            "the answers labelled false too",
            where=where,
            fix="set stage: kto; or, to train on every answer whatever its label, columns: {label: null}",
        )
