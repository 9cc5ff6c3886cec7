"""Answers labelled good or bad: the records of other formats with a true or false in another field (KTO)."""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Labelled, Origin, Text
from meshtune.data.formats.alpaca import ALPACA
from meshtune.data.formats.messages import MESSAGES
from meshtune.data.formats.prompt_completion import PROMPT_COMPLETION
from meshtune.data.formats.record import describe, field_error, missing_field_error
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat
from meshtune.data.formats.sharegpt import SHAREGPT


def with_label(base: RecordFormat) -> RecordFormat:
    """The format `base` with a label; `kto_tag` is LLaMA-Factory's name for that column."""

    def detect(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
        return base.detect(record, fields, tags) if (fields["label"] or "label") in record else 0

    def convert(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Labelled:
        field = fields["label"] or "label"
        good = record.get(field)
        if good is None:
            raise missing_field_error(record, field, origin)
        if isinstance(good, str) and good.strip().lower() in ("true", "false"):  # in a CSV file
            good = good.strip().lower() == "true"
        if not isinstance(good, bool):
            problem = f"expected true or false, found {describe(good)}"
            raise field_error(problem, origin, field, "write true or false")
        document = base.converter(good=good)(record, fields, tags, origin)
        assert isinstance(document, Conversation | Text)
        return Labelled(document, good, origin)

    fields = {**base.fields, "label": "label"}
    aliases = {**base.aliases, "kto_tag": "label"}
    expects = f"{base.expects}; and label, true or false"
    required = (*base.required, "label")
    return RecordFormat(base.name, expects, fields, detect, convert, aliases, base.tags, required=required)


LABELLED_FORMATS = tuple(with_label(form) for form in (ALPACA, SHAREGPT, MESSAGES, PROMPT_COMPLETION))
