"""A recipe's data as the Data page shows them: each source's format and records, documents token by token, lengths."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

from meshtune.board.answers import problems_of
from meshtune.board.recipe_text import content_of
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import Recipe
from meshtune.config.sections import SourceSection, written_out
from meshtune.data.formats import FORMATS_BY_TYPE, select_format
from meshtune.data.inspection import weighted_pieces
from meshtune.data.loader import Loader
from meshtune.data.pictures.expansion import read_pictures
from meshtune.data.pictures.files import load_picture, thumbnail
from meshtune.data.prepare import prepare_data
from meshtune.data.registry import load_registry
from meshtune.data.report import DataReport
from meshtune.data.sources import DataSource, open_source
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES

MOST_RECORDS = 2000  # of a source that are read
SHOWN_RECORDS = 3
SHOWN_DOCUMENTS = 6
SHOWN_TOKENS = 600
SHOWN_CHARACTERS = 4000  # of a record
SHOWN_SKIPPED = 20
SHOWN_PICTURES = 4  # of a document
DETECTION_RECORDS = 20


def preview(request: dict[str, Any]) -> dict[str, Any]:
    """{"sources", "formats", "documents", "reports", "problems_of_data"} of {"recipe": YAML}.

    Keys besides data may be missing: without a model there are records and formats, and no documents.
    """
    content: dict[str, Any] = written_out(content_of(request["recipe"]))
    has_model = bool((content.get("model") or {}).get("path"))
    recipe = load_recipe({"model": "none", "output": "none", **content}, notify=silent)
    dataset_type = STAGES[recipe.stage.kind].dataset_type
    answer: dict[str, Any] = {
        "sources": [_source(recipe, section) for section in recipe.data.train],
        "formats": {
            name: {"fields": list(form.fields), "expects": form.expects}
            for name, form in FORMATS_BY_TYPE[dataset_type].items()
        },
        "names": _names(recipe),
        "documents": [],
        "reports": [],
        "problems_of_data": [],
        "most_records": MOST_RECORDS,
    }
    if has_model and all(not source["problems"] for source in answer["sources"]):
        try:
            answer |= _tokenise_preview(recipe)
        except UserError as error:
            answer["problems_of_data"] = problems_of(error)
    return answer


def _names(recipe: Recipe) -> list[str]:
    """The entries of the registry, if the recipe has one."""
    try:
        return list(load_registry(recipe.data.registry).entries) if recipe.data.registry else []
    except UserError:
        return []


def _source(recipe: Recipe, section: SourceSection) -> dict[str, Any]:
    """The count, fields, first records and format of a source, or its problem."""
    name = section.path or section.name
    dataset_type = STAGES[recipe.stage.kind].dataset_type
    fields: dict[str, Any] = {"name": name, "records": [], "fields": [], "count": None, "format": None, "problems": []}
    try:
        if section.name is not None:
            source = load_registry(recipe.data.registry or "").source(section, dataset_type)
        else:
            options = section.model_dump(exclude={"name", "path"})
            source = DataSource(path=section.path or "", **options)
        records = open_source(source)
        fields["count"] = len(records)
        first = [record for record in itertools.islice(records.sweep(), DETECTION_RECORDS) if isinstance(record, dict)]
        fields["fields"] = list(dict.fromkeys(str(key) for record in first for key in record))
        fields["records"] = [
            {str(key): str(value)[:SHOWN_CHARACTERS] for key, value in record.items()}
            for record in first[:SHOWN_RECORDS]
        ]
        form = select_format(source.format, first, source.path, source.columns, source.tags, dataset_type)
        fields["format"] = form.name
    except UserError as error:
        fields["problems"] = problems_of(error)
    return fields


def _tokenise_preview(recipe: Recipe) -> dict[str, Any]:
    """The first documents token by token, and the reports; records that cannot be used are listed, not raised."""
    tokenizer, _ = tokenizer_of(recipe.model)
    capped = [
        section.model_copy(update={"cap": min(section.cap or MOST_RECORDS, MOST_RECORDS)})
        for section in recipe.data.train
    ]
    data = recipe.data.model_copy(update={"train": capped, "streaming": False, "on_bad": "skip"})
    with tempfile.TemporaryDirectory(prefix="meshtune-preview-") as cache:
        prepared = prepare_data(recipe.model_copy(update={"data": data}), tokenizer, cache=cache)
        assert isinstance(prepared.train, Loader)
        store = prepared.train.store
        documents = [
            {
                "origin": str(example.origin),
                "tokens": len(example.ids),
                "pieces": weighted_pieces(tokenizer, example, SHOWN_TOKENS),
                "pictures": [
                    thumbnail(load_picture(item.picture, str(example.origin)))
                    for item in read_pictures(example.extra)[:SHOWN_PICTURES]
                ],
            }
            for example in (store[index] for index in range(min(SHOWN_DOCUMENTS, len(store))))
        ]
    reports = [report for report in (prepared.report, prepared.validation_report) if report is not None]
    return {"documents": documents, "reports": [_report(report) for report in reports]}


def _report(report: DataReport) -> dict[str, Any]:
    return {
        "split": report.split,
        "samples": report.samples,
        "left_out": report.samples_left_out,
        "tokens": report.counts.tokens,
        "trained_tokens": report.counts.trained_tokens,
        "rows": report.rows,
        "row_length": report.row_length,
        "steps_per_epoch": report.steps_per_epoch,
        "efficiency": report.efficiency,
        "longest": report.longest,
        "histogram": report.histogram,
        "notes": report.notes,
        "warnings": report.warnings,
        "skipped": [{"origin": item.origin, "reason": item.reason} for item in report.skipped[:SHOWN_SKIPPED]],
    }
