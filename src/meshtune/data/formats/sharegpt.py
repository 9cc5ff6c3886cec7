"""ShareGPT: a list of turns, each who it is from and what was said; the names of both, and of the roles, are tags.

`function_call` turns are an assistant's tool calls (JSON text of one call or a list), `observation` turns the tools'
results.
The roles user, assistant and tool are also understood, unless a tag says what a role is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.data.conversation import Conversation, Message, Origin, Role
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.record import (
    bad,
    check_turns,
    list_field,
    shown,
    text,
    text_field,
    tool_call,
    tool_list,
    weight_field,
)
from meshtune.errors import nearest

TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
    "observation_tag": "observation",
    "function_tag": "function_call",
}
# What a role is also called in files that name their turns otherwise.
ALSO = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
ROLES: dict[str, Role] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}


def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    turns = record.get(fields["conversations"] or "")
    if not isinstance(turns, list):
        return 0
    role, content = _keys(turns, tags)
    return 2 if all(isinstance(turn, dict) and role in turn and content in turn for turn in turns) else 1


def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Conversation:
    field = fields["conversations"] or "conversations"
    turns = list_field(record, field, origin, "turns")
    keys, kinds = _keys(turns, tags), _kinds(tags)
    messages, said = [], []
    for index, turn in enumerate(turns):
        messages.append(_message(turn, keys, kinds, origin, f"{field}[{index}]"))
        said.append(turn[keys[0]])
    if fields["system"] and (system := text_field(record, fields["system"], origin, required=False)):
        if messages[0].role == "system":
            what = "a system prompt here and another as the first turn"
            raise bad(what, origin, fields["system"], "take one of the two out")
        messages.insert(0, Message("system", system))
        said.insert(0, "system")
    check_turns(messages, origin, field, said, results_alone=True)
    tools = tool_list(record.get(fields["tools"]), origin, fields["tools"]) if fields["tools"] else ()
    return Conversation(tuple(messages), origin, tools)


def _keys(turns: Sequence[Any], tags: Mapping[str, str]) -> tuple[str, str]:
    """The names of role and content in a turn: the tags', or from/value, or role/content where the turn has those."""
    role, content = tags.get("role_tag"), tags.get("content_tag")
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    if role is None and content is None and "from" not in first and "role" in first:
        return "role", "content"
    return role or TAGS["role_tag"], content or TAGS["content_tag"]


def _kinds(tags: Mapping[str, str]) -> dict[str, str]:
    """The word in a record for each kind of turn -> the kind."""
    words = {}
    for kind in ROLES:
        words[tags.get(kind, TAGS[kind])] = kind
        if kind in ALSO and kind not in tags:
            words.setdefault(ALSO[kind], kind)
    return words


def _message(turn: Any, keys: tuple[str, str], kinds: Mapping[str, str], origin: Origin, place: str) -> Message:
    role_key, content_key = keys
    if not isinstance(turn, dict):
        raise bad(
            f"expected a turn, found {shown(turn)}", origin, place, f'write {{"{role_key}": ..., "{content_key}": ...}}'
        )
    for key in keys:
        if key not in turn:
            what = f"the turn has no '{key}'; its fields are: {', '.join(turn) or 'none'}"
            raise bad(what, origin, f"{place}.{key}", "add it, or set tags: {role_tag: ..., content_tag: ...}")
    said = turn[role_key]
    kind = kinds.get(said) if isinstance(said, str) else None
    if kind is None:
        hint = nearest(said, kinds) if isinstance(said, str) else ""
        raise bad(
            f"unknown role {json.dumps(said, ensure_ascii=False)}",
            origin,
            f"{place}.{role_key}",
            f"{hint}known: {', '.join(kinds)}; another name for a role goes into tags, e.g. user_tag",
        )
    weight, where = weight_field(turn, origin, place), f"{place}.{content_key}"
    content = turn[content_key]
    if kind == "function_tag":
        return Message("assistant", "", weight, _calls(content, origin, where))
    # A tool may well answer nothing, and an empty system prompt is one that a template would otherwise fill in.
    content = text(content, origin, where, required=kind in ("user_tag", "assistant_tag"))
    return Message(ROLES[kind], content, weight)


def _calls(content: Any, origin: Origin, where: str) -> tuple[dict[str, Any], ...]:
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            fix = 'write {"name": ..., "arguments": {...}}, or a list of such'
            raise bad(f"the function call is not JSON ({error}): {content[:60]!r}", origin, where, fix) from None
    calls = content if isinstance(content, list) else [content]
    if not calls:
        raise bad("the list of function calls is empty", origin, where, "write the call, or take the turn out")
    return tuple(tool_call(call, origin, where) for call in calls)


FORMAT = Format(
    name="sharegpt",
    wants="conversations: a list of {from: human|gpt|system|function_call|observation, value: text}; system, tools",
    fields={key: key for key in ("conversations", "system", "tools")},
    aliases={"messages": "conversations"},
    tags=TAGS,
    detect=detect,
    convert=convert,
)
