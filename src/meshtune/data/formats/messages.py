"""OpenAI's messages: role and content, tool calls and tool results, a name, and a weight for a message's loss.

Content is text or a list of text parts; LLaMA-Factory's parts ({"type": "text", "reasoning" or "tool_call", "value":
...}) and its `loss_weight` are understood too. Keys beyond these are kept in `Message.extra` for the chat template.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence

from meshtune.data.conversation import Conversation, Message, Origin, Role
from meshtune.data.formats.context import CONTEXT, read_variables, with_system
from meshtune.data.formats.meanings import check_turn
from meshtune.data.formats.record import (
    SWITCHES,
    WEIGHTS,
    check_text,
    describe,
    field_error,
    list_field,
    parse_json,
    weight_field,
)
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat, same_names
from meshtune.data.formats.tool_use import with_tool_use
from meshtune.data.formats.tools import call_id, parse_tool_call, parse_tools
from meshtune.errors import UserError, nearest

MESSAGE_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
KNOWN_KEYS = {"role", "content", "tool_calls", "function_call", *WEIGHTS, *SWITCHES}
MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "file")


def detect_messages(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    turns = record.get(fields["messages"] or "")
    if not isinstance(turns, list):
        return 0
    return 2 if all(isinstance(turn, dict) and "role" in turn for turn in turns) else 1


def convert_messages(
    record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin, *, good: bool = True
) -> Conversation:
    field = fields["messages"] or "messages"
    messages = read_messages(list_field(record, field, origin, "messages"), origin, field)
    messages = with_system(messages, record, fields, origin)
    tools, functions = (parse_tools(record, fields[key], origin) for key in ("tools", "functions"))
    if tools and functions:
        raise _two_lists_error(origin, fields["functions"] or "functions")
    tools = tools or functions
    turns = with_tool_use(messages, tools, origin, field, good=good)
    return Conversation(turns, origin, tools, read_variables(record, fields, origin))


def _two_lists_error(origin: Origin, field: str) -> UserError:
    return field_error("the record has tools, and functions as well", origin, field, "remove one of the two")


def read_messages(turns: Sequence[object], origin: Origin, field: str) -> list[Message]:
    """Reads and checks each message by itself; the order of roles is not checked."""
    return [_message(turn, origin, f"{field}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: object, origin: Origin, field: str) -> Message:
    if not isinstance(turn, dict):
        problem = f"expected a message, found {describe(turn)}"
        raise field_error(problem, origin, field, 'write {"role": ..., "content": ...}')
    role = _role(turn, origin, field)
    check_turn(turn, origin, field)
    extra = {key: value for key, value in turn.items() if key not in KNOWN_KEYS and value is not None}
    if "tool_call_id" in turn:
        call_id(turn, "tool_call_id", origin, field)
    calls = _calls(turn, origin, field) if turn.get("tool_calls") or turn.get("function_call") else []
    content = turn.get("content")
    if isinstance(content, list):
        content = _parts(content, origin, f"{field}.content", calls, extra)
    if role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    if calls and role != "assistant":
        problem = f"tool calls in a message of {turn['role']}"
        raise field_error(problem, origin, f"{field}.tool_calls", "only an assistant calls tools")
    if not content and not calls:
        _check_content(turn, role, content, extra, origin, field)
    if content is None and calls:
        content = ""
    required = role == "user" or (role == "assistant" and not calls)
    content = check_text(content, origin, f"{field}.content", required=required)
    return Message(role, content, weight_field(turn, origin, field), tuple(calls), tuple(extra.items()))


def _check_content(
    turn: Mapping[str, object], role: Role, content: object, extra: Mapping[str, object], origin: Origin, field: str
) -> None:
    """Raises UserError for a message without content whose content is missing or has another name."""
    if role == "assistant":
        misspelt = _misspelt(extra, ("tool_calls", "content"))
        if misspelt or content is None:
            fix = misspelt or "add one of them, or remove the record"
            raise field_error("the answer has neither content nor tool_calls", origin, f"{field}.content", fix)
    if content is None and "content" not in turn:
        fix = _misspelt(extra, ("content",)) or "add it, or remove the record"
        raise field_error("the message has no content", origin, f"{field}.content", fix)


def _misspelt(fields: Mapping[str, object], names: Sequence[str]) -> str:
    """The advice to rename a field that is misspelt from one of `names`, "" where there is none."""
    close = ((field, name) for field in fields for name in names if nearest(field, (name,)))
    return next((f"rename '{field}' to {name}" for field, name in close), "")


def _role(turn: Mapping[str, object], origin: Origin, field: str) -> Role:
    name = turn.get("role")
    if isinstance(name, str) and name in MESSAGE_ROLES:
        return MESSAGE_ROLES[name]
    raise _role_error(turn, name, origin, field)


def _role_error(turn: Mapping[str, object], name: object, origin: Origin, field: str) -> UserError:
    if "role" not in turn:
        problem = f"the message has no role; its fields are: {', '.join(turn) or 'none'}"
        if misspelt := _misspelt(turn, ("role",)):
            return field_error(problem, origin, f"{field}.role", misspelt)
    else:
        problem = f"unknown role {json.dumps(name, ensure_ascii=False, default=str)}"
    hint = nearest(name, MESSAGE_ROLES) if isinstance(name, str) else ""
    sharegpt = "; for turns of from and value, set format: sharegpt" if "from" in turn else ""
    return field_error(problem, origin, f"{field}.role", f"{hint}known: {', '.join(MESSAGE_ROLES)}{sharegpt}")


def _calls(turn: Mapping[str, object], origin: Origin, field: str) -> list[dict[str, object]]:
    calls = turn.get("tool_calls") or []
    if isinstance(calls, str):
        calls = parse_json(calls, origin, f"{field}.tool_calls")
    if not isinstance(calls, list):
        problem = f"expected a list of tool calls, found {describe(calls)}"
        raise field_error(problem, origin, f"{field}.tool_calls", "write a list")
    calls = [*calls, turn["function_call"]] if turn.get("function_call") else calls
    return [parse_tool_call(call, origin, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _parts(
    parts: list[object], origin: Origin, field: str, calls: list[dict[str, object]], extra: dict[str, object]
) -> str | None:
    """The text of a list of content parts. Reasoning is added to `extra`, tool calls to `calls`."""
    texts, reasoning = [], []
    for index, part in enumerate(parts):
        item = f"{field}[{index}]"
        if not isinstance(part, dict) or not part.get("type"):
            raise field_error(f"not a text part: {describe(part)}", origin, item, 'write {"type": "text", "text": ...}')
        part_type = part["type"]
        value = next((part[key] for key in ("text", "value") if part.get(key) is not None), None)
        if part_type in MEDIA_PARTS:
            problem = f"a part of type '{part_type}'"
            raise field_error(problem, origin, item, "only text can be trained on: remove images, audio and video")
        if part_type in ("text", "input_text", "output_text"):
            texts.append(check_text(value, origin, item, required=False))
        elif part_type == "reasoning":
            reasoning.append(check_text(value, origin, item))
        elif part_type == "tool_call":
            calls.append(parse_tool_call(value, origin, item))
        else:
            raise field_error(f"not a text part: {describe(part)}", origin, item, 'write {"type": "text", "text": ...}')
    if reasoning:
        extra["reasoning_content"] = "\n".join(reasoning)
    return "".join(texts) if texts or not calls else None


MESSAGES = RecordFormat(
    name="messages",
    expects="messages: a list of {role: system|user|assistant|tool, content: text}; also tool_calls, weight, tools",
    fields=same_names("messages", "tools", "functions") | CONTEXT,
    required=("messages",),
    detect=detect_messages,
    convert=convert_messages,
    convert_bad=functools.partial(convert_messages, good=False),
)
