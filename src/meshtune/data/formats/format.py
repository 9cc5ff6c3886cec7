"""What a data format is: how to recognise its records, and how one becomes a document, or a pair or a labelled one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from meshtune.data.conversation import Origin, Sample

Fields = Mapping[str, str | None]  # a format's field -> the record's; None where the records have no such field


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """A format of records.

    `fields` are its own names for the fields of a record, each with the default name in the record; `aliases` are other
    names for them that `columns` may use. `tags` are what `tags` may set, with their defaults. `detect(record, fields,
    tags)` answers how surely a record is of this format: 0 not, 1 it could be, 2 it is. `convert(record, fields, tags,
    origin)` gives the document or raises UserError naming record and field. `wants` says what a record looks like.
    """

    name: str
    wants: str
    fields: Mapping[str, str]
    detect: Callable[[Mapping[str, Any], Fields, Mapping[str, str]], int]
    convert: Callable[[Mapping[str, Any], Fields, Mapping[str, str], Origin], Sample]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def knows(self, column: str) -> bool:
        return column in self.fields or column in self.aliases

    def resolve(self, columns: Fields) -> dict[str, str | None]:
        """The name in the record of every field, with `columns` over the defaults."""
        return dict(self.fields) | {self.aliases.get(key, key): name for key, name in columns.items()}
