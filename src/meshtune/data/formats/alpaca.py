"""Alpaca: an instruction, perhaps an input, and the output, with LLaMA-Factory's reading of them.

The user turn is the instruction and the input, joined by a line break, whichever of them is not empty (LLaMA-Factory's
data/README.md). `history` is a list of [user, assistant] pairs that come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.record import bad, list_field, shown, text, text_field, tool_list


def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    return 2 if fields["instruction"] in record and fields["output"] in record else 0


def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Conversation:
    messages = []
    if fields["system"] and (system := text_field(record, fields["system"], origin, required=False)):
        messages.append(Message("system", system))
    if fields["history"] and record.get(fields["history"]):
        messages += _history(record, fields["history"], origin)
    instruction = _optional(record, fields["instruction"], origin)
    extra = _optional(record, fields["input"], origin)
    if not instruction.strip() and not extra.strip():
        text_field(record, fields["instruction"] or "instruction", origin)
    messages.append(Message("user", "\n".join(part for part in (instruction, extra) if part)))
    messages.append(Message("assistant", text_field(record, fields["output"] or "output", origin)))
    tools = tool_list(record.get(fields["tools"]), origin, fields["tools"]) if fields["tools"] else ()
    return Conversation(tuple(messages), origin, tools)


def _optional(record: Mapping[str, Any], field: str | None, origin: Origin) -> str:
    return text_field(record, field, origin, required=False) if field else ""


def _history(record: Mapping[str, Any], field: str, origin: Origin) -> list[Message]:
    messages = []
    for index, pair in enumerate(list_field(record, field, origin, "[user, assistant] pairs")):
        place = f"{field}[{index}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise bad(
                f"expected a pair, found {shown(pair)}", origin, place, 'write ["what the user said", "the answer"]'
            )
        messages.append(Message("user", text(pair[0], origin, f"{place}[0]")))
        messages.append(Message("assistant", text(pair[1], origin, f"{place}[1]")))
    return messages


FORMAT = Format(
    name="alpaca",
    wants="instruction and output, text; also input, system, history ([[user, assistant], ...]), tools",
    fields={key: key for key in ("instruction", "input", "output", "history", "system", "tools")},
    aliases={"prompt": "instruction", "query": "input", "response": "output"},
    detect=detect,
    convert=convert,
)
