"""OpenAI's messages: role and content, tool calls and tool results, a name, and a weight for a message's loss.

Content is text or a list of text parts; LLaMA-Factory's parts ({"type": "text", "reasoning" or "tool_call", "value":
...}) and `loss_weight` are understood too. Keys beyond these are kept in `Message.extra` for the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshtune.data.conversation import Conversation, Message, Origin, Role
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.record import bad, check_turns, list_field, shown, text, tool_call, tool_list, weight_field
from meshtune.errors import nearest

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
READ = {"role", "content", "tool_calls", "function_call", "weight", "loss_weight"}
MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "file")


def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    turns = record.get(fields["messages"] or "")
    if not isinstance(turns, list):
        return 0
    return 2 if all(isinstance(turn, dict) and "role" in turn for turn in turns) else 1


def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Conversation:
    field = fields["messages"] or "messages"
    messages = read_messages(list_field(record, field, origin, "messages"), origin, field)
    check_turns(messages, origin, field)
    tools = tool_list(record.get(fields["tools"]), origin, fields["tools"]) if fields["tools"] else ()
    return Conversation(tuple(messages), origin, tools)


def read_messages(turns: Any, origin: Origin, field: str) -> list[Message]:
    """Each message read and checked by itself; the order of roles is not looked at."""
    return [_message(turn, origin, f"{field}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: Any, origin: Origin, place: str) -> Message:
    if not isinstance(turn, dict):
        raise bad(f"expected a message, found {shown(turn)}", origin, place, 'write {"role": ..., "content": ...}')
    said = turn.get("role")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        if "role" not in turn:
            what = f"the message has no role; its fields are: {', '.join(turn) or 'none'}"
        else:
            what = f"unknown role {json.dumps(said, ensure_ascii=False, default=str)}"
        hint = nearest(said, ROLES) if isinstance(said, str) else ""
        also = "; for turns of from and value, name format: sharegpt" if "from" in turn else ""
        raise bad(what, origin, f"{place}.role", f"{hint}known: {', '.join(ROLES)}{also}")
    extra = {key: value for key, value in turn.items() if key not in READ and value is not None}
    calls = [
        tool_call(call, origin, f"{place}.tool_calls[{index}]")
        for index, call in enumerate(_raw_calls(turn, origin, place))
    ]
    content = turn.get("content")
    if isinstance(content, list):
        content = _parts(content, origin, f"{place}.content", calls, extra)
    if calls and role != "assistant":
        raise bad(f"tool calls in a message of {said}", origin, f"{place}.tool_calls", "only an assistant calls tools")
    if content is None:
        if "content" not in turn and not calls:
            raise bad("the message has no content", origin, f"{place}.content", "add it, or take the record out")
        content = "" if calls else content
    required = role == "user" or (role == "assistant" and not calls)
    content = text(content, origin, f"{place}.content", required=required)
    return Message(role, content, weight_field(turn, origin, place), tuple(calls), tuple(extra.items()))


def _raw_calls(turn: Mapping[str, Any], origin: Origin, place: str) -> list[Any]:
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        what = f"expected a list of tool calls, found {shown(calls)}"
        raise bad(what, origin, f"{place}.tool_calls", "write a list")
    return [*calls, turn["function_call"]] if turn.get("function_call") else list(calls)


def _parts(
    parts: list[Any], origin: Origin, place: str, calls: list[dict[str, Any]], extra: dict[str, Any]
) -> str | None:
    """The text of a list of content parts; its reasoning goes to `extra`, its tool calls to `calls`."""
    texts, reasoning = [], []
    for index, part in enumerate(parts):
        where = f"{place}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA:
            raise bad(
                f"a part of type '{kind}'", origin, where, "only text can be learned: take images, audio and video out"
            )
        value = next((part[key] for key in ("text", "value") if part.get(key) is not None), None) if kind else None
        if kind in ("text", "input_text", "output_text"):
            texts.append(text(value, origin, where, required=False))
        elif kind == "reasoning":
            reasoning.append(text(value, origin, where))
        elif kind == "tool_call":
            calls.append(tool_call(value, origin, where))
        else:
            raise bad(f"not a text part: {shown(part)}", origin, where, 'write {"type": "text", "text": ...}')
    if reasoning:
        extra["reasoning_content"] = "\n".join(reasoning)
    return "".join(texts) if texts or not calls else None


FORMAT = Format(
    name="messages",
    wants="messages: a list of {role: system|user|assistant|tool, content: text}; also tool_calls, weight, tools",
    fields={key: key for key in ("messages", "tools")},
    detect=detect,
    convert=convert,
)
