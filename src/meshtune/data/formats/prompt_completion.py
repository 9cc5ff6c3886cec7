"""A prompt and its completion: two texts, two lists of messages, or one of each.

Two texts are joined as they stand, without template or space between, and the completion alone is learned. With
messages it is a conversation (a text stands for one user turn, or one assistant turn) and assistant turns in the prompt
are not learned unless they carry a weight of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.messages import read_messages
from meshtune.data.formats.record import bad, check_turns, list_field, text_field, tool_list


def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    return 2 if fields["prompt"] in record and fields["completion"] in record else 0


def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Conversation | Text:
    prompt, completion = fields["prompt"] or "prompt", fields["completion"] or "completion"
    if not isinstance(record.get(prompt), list) and not isinstance(record.get(completion), list):
        first = text_field(record, prompt, origin)
        return Text(text_field(record, completion, origin), origin, prompt=first)
    head = [
        dataclasses.replace(message, weight=0.0) if message.role == "assistant" and message.weight is None else message
        for message in _messages(record, prompt, "user", origin)
    ]
    tail = _messages(record, completion, "assistant", origin)
    if tail[0].role != "assistant":
        what = f"the completion begins with {tail[0].role}"
        raise bad(what, origin, f"{completion}[0]", "begin it with an assistant turn; the rest belongs to the prompt")
    check_turns([*head, *tail], origin, f"{prompt} + {completion}")
    tools = tool_list(record.get(fields["tools"]), origin, fields["tools"]) if fields["tools"] else ()
    return Conversation((*head, *tail), origin, tools)


def _messages(record: Mapping[str, Any], field: str, role: Any, origin: Origin) -> list[Message]:
    if isinstance(record.get(field), str):
        return [Message(role, text_field(record, field, origin))]
    return read_messages(list_field(record, field, origin, "messages"), origin, field)


FORMAT = Format(
    name="prompt_completion",
    wants="prompt and completion, each text or a list of messages; also tools",
    fields={key: key for key in ("prompt", "completion", "tools")},
    detect=detect,
    convert=convert,
)
