"""A prompt and its completion: two texts, two lists of messages, or one of each.

Two texts are concatenated without a template or a space between them, and only the completion is trained on. With
messages the record is a conversation, where a text means one user turn (the prompt) or one assistant turn (the
completion); assistant turns in the prompt are trained on only if they have a weight of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin, Role, Text
from meshtune.data.formats.context import CONTEXT, read_variables, refuse_beside_texts, with_system
from meshtune.data.formats.messages import read_messages
from meshtune.data.formats.record import field_error, list_field, text_field
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat, has_fields, same_names
from meshtune.data.formats.tool_use import with_tool_use
from meshtune.data.formats.tools import parse_tools


def convert_prompt_completion(
    record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin
) -> Conversation | Text:
    prompt, completion = fields["prompt"] or "prompt", fields["completion"] or "completion"
    if not isinstance(record.get(prompt), list) and not isinstance(record.get(completion), list):
        refuse_beside_texts(record, fields, origin, prompt, completion)
        prompt_text = text_field(record, prompt, origin)
        return Text(text_field(record, completion, origin), origin, prompt=prompt_text)
    head = with_system(_messages_of(record, prompt, "user", origin), record, fields, origin)
    head = [
        dataclasses.replace(message, weight=0.0) if message.role == "assistant" and message.weight is None else message
        for message in head
    ]
    tail = _messages_of(record, completion, "assistant", origin)
    if tail[0].role != "assistant":
        problem = f"the completion begins with {tail[0].role}"
        fix = "begin it with an assistant turn; the turns before belong to the prompt"
        raise field_error(problem, origin, f"{completion}[0]", fix)
    tools = parse_tools(record, fields["tools"], origin)
    messages = with_tool_use([*head, *tail], tools, origin, f"{prompt} + {completion}")
    return Conversation(messages, origin, tools, read_variables(record, fields, origin))


def _messages_of(record: Record, field: str, role: Role, origin: Origin) -> list[Message]:
    if isinstance(record.get(field), str):
        return [Message(role, text_field(record, field, origin))]
    return read_messages(list_field(record, field, origin, "messages"), origin, field)


PROMPT_COMPLETION = RecordFormat(
    name="prompt_completion",
    expects="prompt and completion, each text or a list of messages; also tools",
    fields=same_names("prompt", "completion", "tools") | CONTEXT,
    required=("prompt", "completion"),
    detect=has_fields("prompt", "completion"),
    convert=convert_prompt_completion,
)
