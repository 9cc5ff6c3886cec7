"""Plain text, one document a record. A .txt file gives a document for every line that is not blank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.data.conversation import Origin, Text
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.record import text_field


def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    """Only a guess: data of other formats often carries a rendered `text` beside its own fields."""
    return 1 if isinstance(record.get(fields["text"] or ""), str) else 0


def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Text:
    return Text(text_field(record, fields["text"] or "text", origin), origin)


FORMAT = Format(name="text", wants="text", fields={"text": "text"}, detect=detect, convert=convert)
