"""Answers labelled good or bad: the records of other formats with a true or false beside them (KTO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.data.conversation import Conversation, Labelled, Origin, Text
from meshtune.data.formats import alpaca, messages, prompt_completion, sharegpt
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.record import bad, shown, text_field


def labelled(base: Format) -> Format:
    """Records of `base` with a label; `kto_tag` is LLaMA-Factory's name for that column."""

    def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
        return base.detect(record, fields, tags) if (fields["label"] or "label") in record else 0

    def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Labelled:
        field = fields["label"] or "label"
        good = record.get(field)
        if not isinstance(good, bool):
            if good is None:
                text_field(record, field, origin)  # says that it is missing or null
            raise bad(f"expected true or false, found {shown(good)}", origin, field, "write true or false")
        document = base.convert(record, fields, tags, origin)
        assert isinstance(document, Conversation | Text)
        return Labelled(document, good, origin)

    fields = {**base.fields, "label": "label"}
    aliases = {**base.aliases, "kto_tag": "label"}
    return Format(base.name, f"{base.wants}; and label, true or false", fields, detect, convert, aliases, base.tags)


FORMATS: tuple[Format, ...] = tuple(
    labelled(module.FORMAT) for module in (alpaca, sharegpt, messages, prompt_completion)
)
