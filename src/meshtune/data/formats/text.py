"""Plain text, one document per record. A .txt file gives a document for every line that is not blank."""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.data.conversation import Origin, Text
from meshtune.data.formats.record import text_field
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat


def detect_text(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    """At most 1, since records of other formats often have a rendered `text` too."""
    return 1 if isinstance(record.get(fields["text"] or ""), str) else 0


def convert_text(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Text:
    return Text(text_field(record, fields["text"] or "text", origin), origin)


TEXT = RecordFormat(
    name="text", expects="text", fields={"text": "text"}, detect=detect_text, convert=convert_text, required=("text",)
)
