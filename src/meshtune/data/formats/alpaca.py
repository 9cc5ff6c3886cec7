"""Alpaca: an instruction, an optional input, and the output, as LLaMA-Factory reads them.

The user turn is the instruction and the input, whichever are not empty, joined by a line break (LLaMA-Factory's
data/README.md). `history` is a list of [user, assistant] pairs that come first.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.formats.context import CONTEXT, read_variables, with_system
from meshtune.data.formats.meanings import is_blank
from meshtune.data.formats.record import check_text, describe, field_error, list_field, text_field
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat, has_fields, same_names
from meshtune.data.formats.tools import parse_tools


def convert_alpaca(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation:
    messages = with_system([], record, fields, origin)
    if fields["history"] and not is_blank(record.get(fields["history"])):
        messages += _history(record, fields["history"], origin)
    instruction = _optional_text(record, fields["instruction"], origin)
    extra = _optional_text(record, fields["input"], origin)
    if not instruction.strip() and not extra.strip():
        text_field(record, fields["instruction"] or "instruction", origin)
    messages.append(Message("user", "\n".join(part for part in (instruction, extra) if part)))
    messages.append(Message("assistant", text_field(record, fields["output"] or "output", origin)))
    tools = parse_tools(record, fields["tools"], origin)
    return Conversation(tuple(messages), origin, tools, read_variables(record, fields, origin))


def _optional_text(record: Record, field: str | None, origin: Origin) -> str:
    return text_field(record, field, origin, required=False) if field else ""


def _history(record: Record, field: str, origin: Origin) -> list[Message]:
    messages = []
    for index, pair in enumerate(list_field(record, field, origin, "[user, assistant] pairs")):
        item = f"{field}[{index}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            problem = f"expected a pair, found {describe(pair)}"
            raise field_error(problem, origin, item, 'write ["the user\'s message", "the answer"]')
        messages.append(Message("user", check_text(pair[0], origin, f"{item}[0]")))
        messages.append(Message("assistant", check_text(pair[1], origin, f"{item}[1]")))
    return messages


ALPACA = RecordFormat(
    name="alpaca",
    expects="instruction and output, text; also input, system, history ([[user, assistant], ...]), tools",
    fields=same_names("instruction", "input", "output", "history", "tools") | CONTEXT,
    required=("output",),
    aliases={"prompt": "instruction", "query": "input", "response": "output"},
    detect=has_fields("instruction", "output"),
    convert=convert_alpaca,
)
