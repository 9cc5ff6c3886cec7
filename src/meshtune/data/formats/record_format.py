"""The description of a data format: how to recognise its records, and how to convert one to a sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from meshtune.data.conversation import Origin, Sample

Record = Mapping[str, object]
FieldNames = Mapping[str, str | None]
"""A format's fields -> the record's; None where the records have no such field."""


def same_names(*fields: str) -> dict[str, str]:
    """Fields that records name as the format does."""
    return {field: field for field in fields}


Detect = Callable[[Record, FieldNames, Mapping[str, str]], int]


def has_fields(*fields: str) -> Detect:
    """The detection of a format whose records have all of these fields."""
    return lambda record, names, tags: 2 if all(names[field] in record for field in fields) else 0


def only_by_name(record: Record, names: FieldNames, tags: Mapping[str, str]) -> int:
    """The detection of a format whose records look like those of another, so that it must be named."""
    return 0


@dataclasses.dataclass(frozen=True, eq=False)
class RecordFormat:
    """A format of records.

    `expects` describes a record for people. `fields` maps the format's own field names to their default names in a
    record, `aliases` further names that `columns` may use for them; `required` are the fields that it cannot do
    without; `tags` are the tags it knows, with their defaults.
    `detect(record, field_names, tags)` says how well a record fits: 0 not, 1 possibly, 2 certainly.
    `convert(record, field_names, tags, origin)` returns the sample, or raises UserError naming record and field.
    `convert_bad` does so for an answer that is an example of a bad one, which may call tools that do not exist; None
    where that is no different.
    """

    name: str
    expects: str
    fields: Mapping[str, str]
    detect: Detect
    convert: Callable[[Record, FieldNames, Mapping[str, str], Origin], Sample]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    convert_bad: Callable[[Record, FieldNames, Mapping[str, str], Origin], Sample] | None = None
    required: tuple[str, ...] = ()

    def converter(self, *, good: bool) -> Callable[[Record, FieldNames, Mapping[str, str], Origin], Sample]:
        """The converter of records of good or of bad answers."""
        return self.convert if good or self.convert_bad is None else self.convert_bad

    def has_column(self, column: str) -> bool:
        """Whether `columns` may name this field."""
        return column in self.fields or column in self.aliases

    def accepts(self, columns: FieldNames) -> bool:
        """Whether the format has all of `columns`; of those that are not to be read it needs none."""
        return all(self.has_column(column) for column, name in columns.items() if name is not None) and not (
            self.missing(columns)
        )

    def missing(self, columns: FieldNames) -> list[str]:
        """The required fields that `columns` says are not to be read."""
        unread = [self.aliases.get(column, column) for column, name in columns.items() if name is None]
        return [field for field in self.required if field in unread]

    def resolve(self, columns: FieldNames) -> dict[str, str | None]:
        """The name of every field in the records, `columns` taking precedence over the defaults. A column that the
        format does not have is in it where it is not to be read."""
        return dict(self.fields) | {self.aliases.get(key, key): name for key, name in columns.items()}
