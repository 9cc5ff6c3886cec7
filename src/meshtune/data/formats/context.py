"""Fields that may accompany a conversation in every format: a system prompt, variables of the template.

Texts without a chat template have no place for them, nor for tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshtune.data.conversation import JsonObject, Message, Origin
from meshtune.data.formats.meanings import is_blank, unread_field_error
from meshtune.data.formats.record import describe, field_error, parse_json, text_field
from meshtune.data.formats.record_format import FieldNames, Record

CONTEXT = {"system": "system", "chat_template_kwargs": "chat_template_kwargs"}
# Parameters of apply_chat_template that are no variables of a template.
_RESERVED = ("tools", "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message")
_RESERVED += ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
_RESERVED += ("return_assistant_tokens_mask",)


def with_system(messages: Sequence[Message], record: Record, fields: FieldNames, origin: Origin) -> list[Message]:
    """Puts the record's own system prompt, if it has one, before the messages. Raises UserError where they begin
    with another."""
    field = fields.get("system")
    value = record.get(field) if field else None
    if not field or value == "" or (not isinstance(value, str) and is_blank(value)):
        return list(messages)
    return _with_own_system(messages, text_field(record, field, origin, required=False), origin, field)


def _with_own_system(messages: Sequence[Message], system: str, origin: Origin, field: str) -> list[Message]:
    if messages and messages[0].role == "system" and messages[0].content.strip() == system.strip():
        return list(messages)
    if messages and messages[0].role == "system":
        problem = "there is a system prompt here and another as the first turn"
        fix = "remove one of the two; or columns: {system: null} trains without this one"
        raise field_error(problem, origin, field, fix)
    return [Message("system", system), *messages]


def read_variables(record: Record, fields: FieldNames, origin: Origin) -> JsonObject:
    """The variables that a record sets for the chat template, from an object or JSON text. Raises UserError where they
    are none."""
    field = fields.get("chat_template_kwargs")
    value = record.get(field) if field else None
    return {} if not field or is_blank(value) else _parse_variables(value, field, origin)


def _parse_variables(value: object, field: str, origin: Origin) -> JsonObject:
    if isinstance(value, str):
        value = parse_json(value, origin, field)
    if not isinstance(value, Mapping):
        problem = f"expected an object of variables, found {describe(value)}"
        raise field_error(problem, origin, field, 'write {"enable_thinking": false}, say')
    for name in value:
        if name in _RESERVED or not isinstance(name, str):
            fix = "move them to 'tools', beside it" if name == "tools" else "remove it"
            raise field_error("not a variable of a chat template", origin, f"{field}.{name}", fix)
    return {name: item for name, item in value.items() if item is not None}


def refuse_beside_texts(record: Record, fields: FieldNames, origin: Origin, instruction: str, output: str = "") -> None:
    """Raises UserError for fields that need a chat template, in records of plain text.

    `instruction` and `output` are the fields of the texts that the format alpaca would read as turns of a conversation.
    """
    for column in (*CONTEXT, "tools"):
        name = fields.get(column)
        if name and not is_blank(record.get(name)):
            answer = f", output: {output}" if output else ""
            columns = f"{{instruction: {instruction}{answer}}}"
            remedy = "texts are trained on without a chat template, which would write it: "
            remedy += f"format: alpaca, columns: {columns} reads them as a conversation"
            raise unread_field_error(record, name, origin, remedy, column)
