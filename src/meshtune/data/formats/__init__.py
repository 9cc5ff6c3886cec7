"""The data formats, and detection of the one that records have. Adding a format is a module and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from meshtune.data.formats.alpaca import ALPACA, PROMPT_COMPLETION, STANFORD_ALPACA, TEXT
from meshtune.data.formats.messages import HERMES, MESSAGES, SHAREGPT, XLAM
from meshtune.data.formats.record import FIELDS, FieldNames, Record, RecordFormat
from meshtune.errors import UserError, nearest
from meshtune.lazy import LazyFunction, LazyTable

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType

name_one = LazyFunction("meshtune.data.formats.hints:name_one")
columns_line = LazyFunction("meshtune.data.formats.hints:columns_line")
first_problem = LazyFunction("meshtune.data.formats.hints:first_problem")
chosen_line = LazyFunction("meshtune.data.formats.hints:chosen_line")

DOCUMENT_FORMATS: dict[str, RecordFormat] = {
    form.name: form for form in (ALPACA, SHAREGPT, MESSAGES, PROMPT_COMPLETION, TEXT, STANFORD_ALPACA, HERMES, XLAM)
}

FORMATS_BY_TYPE: Mapping[DatasetType, dict[str, RecordFormat]] = LazyTable(
    {
        "documents": "meshtune.data.formats:DOCUMENT_FORMATS",
        "pairs": "meshtune.data.formats.preference:PREFERENCE_FORMATS",
        "labelled": "meshtune.data.formats.preference:LABELLED_FORMATS",
        "prompts": "meshtune.data.formats.prompts:PROMPT_FORMATS",
    }
)
EXAMPLE_STAGE: dict[DatasetType, str] = {"documents": "sft", "pairs": "dpo", "labelled": "kto", "prompts": "grpo"}


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
    candidates = list(FORMATS_BY_TYPE[dataset_type].values())
    if name != "auto" or columns or tags:
        candidates = _candidates(name, columns, tags, where, dataset_type)
    if name != "auto":
        _check_not_missing(candidates[0], columns, where)
        return candidates[0]
    objects = [record for record in records if isinstance(record, dict)]
    if not objects:
        fix = 'write records as {"field": value}'
        raise UserError("the first records are not objects, so no format fits", where=where, fix=fix)
    if dataset_type == "documents" and (evidence := _holds_preferences(objects, columns)):
        raise _preferences_error(evidence, objects, where)
    fitting, score = _best_fitting(objects, candidates, columns, tags)
    if score == 0 or len(fitting) > 1:
        raise _no_format_error(objects, fitting if score else candidates, score, columns, tags, where, dataset_type)
    return fitting[0]


def _check_not_missing(form: RecordFormat, columns: FieldNames, where: str) -> None:
    """Raises UserError where `columns` leaves out a field that the format cannot do without."""
    if missing := form.missing(columns):
        problem = f"format {form.name} cannot do without {', '.join(missing)}, which columns says is not to be read"
        raise UserError(problem, where=f"{where}, columns", fix="name the field that holds it, or another format")


def _no_format_error(
    records: Sequence[Record],
    candidates: Sequence[RecordFormat],
    score: int,
    columns: FieldNames,
    tags: Mapping[str, str],
    where: str,
    dataset_type: DatasetType,
) -> UserError:
    """The error for records that fit no format (`score` 0), or all of `candidates`."""
    names = ", ".join(dict.fromkeys(str(key) for record in records for key in record)) or "none"
    if score:
        listed = ", ".join(form.name for form in candidates)
        problem = f"the records fit more than one format: {listed}; their fields are: {names}"
        return UserError(problem, where=where, fix=name_one(records, candidates, columns, tags))
    expected = "\n".join(f"  {form.name}: {form.expects}" for form in candidates)
    fix = "name the format and, where fields have other names, columns: {the format's field: the record's}"
    line = columns_line(records, {form.name: form for form in candidates}, where)
    problem = f"no format fits the records; their fields are: {names}\n{expected}"
    problem += _stage_hint(records, columns, tags, dataset_type)
    return UserError(problem, where=where, fix=f"{line}; or {fix}" if line else fix)


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
        if score == 2 and len(fitting) == 1 and first_problem(fitting[0], records, columns, tags) is None:
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
    left_out = [key for key, value in columns.items() if value is None]
    if left_out:
        anywhere = [key for kinds in FORMATS_BY_TYPE.values() for form in kinds.values() for key in form.fields]
        left_out = [key for key in left_out if key not in anywhere]
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
    """The evidence that the first record holds preferences: "answers", "label", or ""."""
    first = records[0]
    if "chosen" in first and "rejected" in first:
        return "answers"
    if columns.get("label", "label") is None or not isinstance(first.get("label"), bool):
        return ""
    labelled_formats = [form for form in FORMATS_BY_TYPE["labelled"].values() if form.accepts(columns)]
    return "label" if _best_fitting([first], labelled_formats, columns, {})[1] == 2 else ""


def _preferences_error(evidence: str, records: Sequence[Record], where: str) -> UserError:
    if evidence == "answers":
        line = chosen_line(records, DOCUMENT_FORMATS)
        return UserError(
            "these are preference data (chosen and rejected), which supervised tuning does not train on",
            where=where,
            fix="set stage: dpo (or rm, orpo, simpo, cpo); or, to train on the chosen answers, "
            + (line or "make records that hold them"),
        )
    return UserError(
        "these are preference data (a true/false label of each answer), and supervised tuning would train on "
        "the answers labelled false too",
        where=where,
        fix="set stage: kto; or, to train on every answer whatever its label, columns: {label: null}",
    )
