"""Formats of prompts, for online stages: TRL's `prompt`, and the formats of documents without their last answer.

All other fields of a record are columns for rewards, as in TRL, and `answer` is the answer of a document.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin, Prompt, Text
from meshtune.data.formats.alpaca import ALPACA, PROMPT_COMPLETION
from meshtune.data.formats.messages import MESSAGES, SHAREGPT, read_messages
from meshtune.data.formats.record import (
    CONTEXT,
    FieldNames,
    Record,
    RecordFormat,
    field_error,
    list_field,
    read_variables,
    refuse_beside_texts,
    same_names,
    text_field,
    with_system,
)
from meshtune.data.formats.tools import parse_tools, with_tool_use

ANSWER = "answer"  # the column that holds a document's own answer
_ANY_ANSWER = Message("assistant", "-")  # completes a conversation for the checks of its turns, and is cut off again


def columns_of(record: Record, fields: FieldNames, **further: str) -> str:
    """The fields of a record that its format does not read, as JSON text."""
    read = set(fields.values())
    return json.dumps({**further, **{name: value for name, value in record.items() if name not in read}}, default=str)


def _detect_prompt(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    value = record.get(fields["prompt"] or "prompt")
    return 2 if isinstance(value, str | list) and "completion" not in record else 0


def _convert_prompt(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Prompt:
    field = fields["prompt"] or "prompt"
    columns = columns_of(record, fields)
    if not isinstance(record.get(field), list):
        refuse_beside_texts(record, fields, origin, field)
        return Prompt(Text(text_field(record, field, origin), origin), columns, origin)
    messages = read_messages(list_field(record, field, origin, "messages"), origin, field)
    if messages[-1].role == "assistant":
        fix = "end it with a message of the user; or set format: messages, which takes the last answer off"
        raise field_error("the prompt ends with an answer", origin, f"{field}[{len(messages) - 1}]", fix)
    tools = parse_tools(record, fields["tools"], origin)
    turns = with_tool_use([*with_system(messages, record, fields, origin), _ANY_ANSWER], tools, origin, field)[:-1]
    return Prompt(Conversation(turns, origin, tools, read_variables(record, fields, origin)), columns, origin)


PROMPT = RecordFormat(
    name="prompt",
    expects="prompt, text or a list of messages that ends before the answer; other fields are columns for rewards",
    fields=same_names("prompt", "tools") | CONTEXT,
    required=("prompt",),
    aliases={"messages": "prompt"},
    detect=_detect_prompt,
    convert=_convert_prompt,
    has_columns=True,
)


def without_answer(base: RecordFormat) -> RecordFormat:
    """The format `base` of documents as one of prompts: the last answer becomes a column."""

    def convert(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Prompt:
        document = base.convert(record, fields, tags, origin)
        if isinstance(document, Text):
            columns = columns_of(record, fields, **{ANSWER: document.text})
            return Prompt(dataclasses.replace(document, text=document.prompt, prompt=""), columns, origin)
        assert isinstance(document, Conversation)
        columns = columns_of(record, fields, **{ANSWER: document.messages[-1].content})
        return Prompt(dataclasses.replace(document, messages=document.messages[:-1]), columns, origin)

    return dataclasses.replace(base, convert=convert, convert_bad=None, has_columns=True)


_ANSWERED = (ALPACA, SHAREGPT, MESSAGES, PROMPT_COMPLETION)
PROMPT_FORMATS = {form.name: form for form in (PROMPT, *map(without_answer, _ANSWERED))}
