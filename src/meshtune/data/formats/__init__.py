"""The data formats, and which of them a source's records have. A new format is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.data.formats import alpaca, labelled, messages, preference, prompt_completion, sharegpt, text
from meshtune.data.formats.format import Fields, Format
from meshtune.errors import UserError, nearest

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT for module in (alpaca, sharegpt, messages, prompt_completion, text)
}

# What a stage learns from -> the formats of it, by the same names where the records are otherwise alike.
KINDS: dict[str, dict[str, Format]] = {
    "documents": FORMATS,
    "pairs": {one.name: one for one in preference.FORMATS},
    "labelled": {one.name: one for one in labelled.FORMATS},
}
STAGES = {"documents": "sft", "pairs": "dpo", "labelled": "kto"}  # an example of a stage for each


def choose(
    name: str,
    records: Sequence[Any],
    where: str,
    columns: Fields | None = None,
    tags: Mapping[str, str] | None = None,
    learns: str = "documents",
) -> Format:
    """The format called `name`, or for "auto" the one that the first `records` of the source `where` have.

    Raises UserError for an unknown name, column or tag, and for "auto" where no format fits, several do, or the records
    hold preferences (chosen and rejected, or a label of good and bad answers).
    """
    columns, tags = columns or {}, tags or {}
    candidates = _named(name, columns, tags, where, learns)
    if name != "auto":
        return candidates[0]
    objects = [record for record in records if isinstance(record, dict)]
    if not objects:
        raise UserError(
            "the first records are no objects, so no format fits", where=where, fix='write records as {"field": value}'
        )
    if learns == "documents":
        _refuse_preferences(objects, where)
    scores = {one: max(one.detect(record, one.resolve(columns), tags) for record in objects) for one in candidates}
    best = max(scores.values())
    fitting = [one for one, score in scores.items() if score == best]
    keys = ", ".join(dict.fromkeys(key for record in objects for key in record)) or "none"
    if best == 0:
        wants = "\n".join(f"  {one.name}: {one.wants}" for one in candidates)
        fits = next((kind for kind in KINDS if kind != learns and _any_fits(KINDS[kind], objects, columns, tags)), None)
        wants += f"\n(they would suit stage {STAGES[fits]})" if fits else ""
        raise UserError(
            f"no format fits the records; their fields are: {keys}\n{wants}",
            where=where,
            fix="name the format and, where fields are called otherwise, columns: {the format's field: the record's}",
        )
    if len(fitting) > 1:
        raise UserError(
            f"the records fit more than one format: {', '.join(one.name for one in fitting)}; their fields are: {keys}",
            where=where,
            fix=f"say which is meant, e.g. format: {fitting[0].name}",
        )
    return fitting[0]


def _any_fits(
    formats: Mapping[str, Format], records: Sequence[Mapping[str, Any]], columns: Fields, tags: Mapping[str, str]
) -> bool:
    fitting = [one for one in formats.values() if all(map(one.knows, columns))]
    return any(one.detect(record, one.resolve(columns), tags) == 2 for one in fitting for record in records)


def _named(name: str, columns: Fields, tags: Mapping[str, str], where: str, learns: str) -> list[Format]:
    """The formats in question: the named one or all, without those that `columns` and `tags` rule out."""
    among = KINDS[learns]
    if name != "auto" and name not in among:
        known = ", ".join(["auto", *among])
        what = f"format '{name}' is not one of {learns}" if any(name in kind for kind in KINDS.values()) else ""
        raise UserError(what or f"unknown format '{name}'", where=where, fix=f"{nearest(name, among)}known: {known}")
    formats = list(among.values()) if name == "auto" else [among[name]]
    whose = "any format" if name == "auto" else f"format {name}"
    known_columns = list(dict.fromkeys(key for one in formats for key in (*one.fields, *one.aliases)))
    known_tags = list(dict.fromkeys(key for one in formats for key in one.tags))
    for kind, given, known in (("columns", columns, known_columns), ("tags", tags, known_tags)):
        for key in given:
            if key not in known:
                listed = f"known: {', '.join(known)}" if known else f"{whose} has none"
                raise UserError(
                    f"'{key}' is not one of the {kind} of {whose}",
                    where=f"{where}, {kind}",
                    fix=f"{nearest(key, known)}{listed}",
                )
    fitting = [one for one in formats if all(map(one.knows, columns)) and all(tag in one.tags for tag in tags)]
    if not fitting:
        given = ", ".join([*columns, *tags])
        raise UserError(f"no one format has all of these columns and tags: {given}", where=where, fix="name the format")
    return fitting


def _refuse_preferences(records: Sequence[Mapping[str, Any]], where: str) -> None:
    first = records[0]
    if "chosen" in first and "rejected" in first:
        raise UserError(
            "these are preference data (chosen and rejected), which supervised tuning does not learn from",
            where=where,
            fix="set stage: dpo (or rm, orpo, simpo, cpo); or, to learn the chosen answers, make records that hold "
            "them, or name a format whose columns are texts, e.g. format: text, columns: {text: chosen}",
        )
    if isinstance(first.get("label"), bool) and any(isinstance(value, list) for value in first.values()):
        raise UserError(
            "these are preference data (a true/false label of each conversation): learning the answers labelled false "
            "is hardly meant",
            where=where,
            fix="set stage: kto; or take out the records labelled false; or name the format, to learn every answer "
            "whatever its label",
        )
