"""Suggests what to write into a recipe for records that no format fits, or several do.

A suggestion is tried on the records before it is made.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from meshtune.data.conversation import Origin
from meshtune.data.formats.record import FieldNames, Record, RecordFormat, read_record
from meshtune.errors import UserError

# Names that others give to the two sides of a record, where it has more than two texts.
_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "user", "human", "problem")
_CONTEXTS = ("context", "passage", "background", "article", "document")
_ANSWERS = ("answer", "response", "output", "completion", "assistant", "reply", "solution")


def first_problem(
    form: RecordFormat, records: Sequence[Record], columns: FieldNames, tags: Mapping[str, str]
) -> UserError | None:
    """The first error of reading records in a format, None if all can be read."""
    fields = form.resolve(columns)
    for index, record in enumerate(records):
        try:
            read_record(form, record, fields, tags, Origin("records", index))
        except UserError as problem:
            return problem
    return None


def name_one(
    records: Sequence[Record], fitting: Sequence[RecordFormat], columns: FieldNames, tags: Mapping[str, str]
) -> str:
    """The advice to name one of several formats that records fit: those that can read them all."""
    problems = {form.name: first_problem(form, records, columns, tags) for form in fitting}
    readable = [f"format: {name}" for name, problem in problems.items() if problem is None]
    if readable:
        return f"name the one you mean: {', or '.join(readable)}"
    listed = "; ".join(f"format: {name} ({problem.what})" for name, problem in problems.items() if problem)
    return f"name the one you mean, and correct the records: {listed}"


def columns_line(records: Sequence[Record], formats: Mapping[str, RecordFormat], where: str) -> str:
    """A source with the format and columns that read records whose fields have names of their own, "" if there is
    none."""
    for name, columns in _guesses(records):
        form = formats.get(name)
        if form is not None and form.accepts(columns) and first_problem(form, records, columns, {}) is None:
            listed = ", ".join(f"{field}: {_quote(column)}" for field, column in columns.items())
            source = f"{{path: {_quote(where)}, format: {name}, columns: {{{listed}}}}}"
            return f"if that is what they hold, 'data.train={source}'"
    return ""


def chosen_line(records: Sequence[Record], formats: Mapping[str, RecordFormat]) -> str:
    """The format and columns that read the chosen answers of pairs, "" if there are none."""
    fields = {"preference": "", "text": "text", "messages": "messages", "sharegpt": "conversations"}
    guesses: list[tuple[str, dict[str, str]]] = [
        ("prompt_completion", {"completion": "chosen"}),
        ("alpaca", {"output": "chosen"}),
        *((name, {field: "chosen"}) for name, field in fields.items() if field),
    ]
    for name, columns in guesses:
        if first_problem(formats[name], records, columns, {}) is None:
            ((field, column),) = columns.items()
            return f"format: {name}, columns: {{{field}: {column}}}"
    return ""


def _guesses(records: Sequence[Record]) -> Iterator[tuple[str, dict[str, str]]]:
    """Formats and columns that records may have been meant for, by the types and names of their fields."""
    shared = [name for name in records[0] if all(name in record for record in records)]
    texts = [name for name in shared if all(isinstance(record[name], str) for record in records)]
    lists = [name for name in shared if all(isinstance(record[name], list) for record in records)]
    labels = [name for name in shared if all(isinstance(record[name], bool) for record in records)]
    for name in lists:
        yield "messages", {"messages": name}
        yield "sharegpt", {"conversations": name}
    for chosen, rejected in itertools.pairwise(lists):
        yield "preference", {"chosen": chosen, "rejected": rejected}
    questions = [name for name in texts if any(word in name.lower() for word in _QUESTIONS)]
    answers = [name for name in texts if any(word in name.lower() for word in _ANSWERS)]
    if len(texts) == 2:
        sides = (answers[0], questions[0]) if questions == texts[1:] and answers == texts[:1] else (texts[1], texts[0])
    else:
        sides = (answers[0], questions[0]) if len(questions) == len(answers) == 1 and questions != answers else None
    if sides is not None:
        contexts = [name for name in texts if name not in sides and any(word in name.lower() for word in _CONTEXTS)]
        columns = {"instruction": sides[1], **({"input": contexts[0]} if contexts else {}), "output": sides[0]}
        for label in labels[:1]:
            yield "alpaca", {**columns, "label": label}
        yield "alpaca", columns
    if len(questions) == 1 and {"chosen", "rejected"} <= set(texts):
        yield "preference", {"prompt": questions[0]}
        yield "alpaca", {"instruction": questions[0]}
    if len(texts) == 3:
        yield "preference", dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
    if len(texts) == 1:
        yield "text", {"text": texts[0]}


def _quote(name: str) -> str:
    """A name as YAML reads it within { }."""
    return (
        name
        if re.fullmatch(r"[\w./-]+", name) and not re.fullmatch(r"[\d.]+|true|false|null|yes|no|on|off", name, re.I)
        else json.dumps(name, ensure_ascii=False)
    )
