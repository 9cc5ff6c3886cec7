"""ShareGPT: a list of turns, each with a speaker and a text; tags give the names of both keys and of the speakers.

`function_call` turns are an assistant's tool calls (JSON text of one call or a list, after a <think> block or none),
`observation` turns the tools' results. The speakers user, assistant and tool are also understood, unless a tag renames
them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence

from meshtune.data.conversation import Conversation, JsonObject, Message, Origin, Role
from meshtune.data.formats.context import CONTEXT, read_variables, with_system
from meshtune.data.formats.meanings import check_turn, is_blank
from meshtune.data.formats.record import (
    check_text,
    describe,
    field_error,
    list_field,
    weight_field,
)
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat, same_names
from meshtune.data.formats.tool_use import with_tool_use
from meshtune.data.formats.tools import parse_tool_call, parse_tools
from meshtune.data.reasoning import split_reasoning
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
# Further names of speakers, understood where no tag renames them.
SYNONYMS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
# What OpenAI's messages have beside role and content.
MESSAGE_FIELDS = ("tool_calls", "function_call", "tool_call_id", "reasoning_content", "reasoning", "thinking")
SPEAKER_ROLES: dict[str, Role] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "assistant",
}


def detect_sharegpt(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    turns = record.get(fields["conversations"] or "")
    if not isinstance(turns, list):
        return 0
    role, content = _keys(turns, tags)
    return 2 if all(isinstance(turn, dict) and role in turn and content in turn for turn in turns) else 1


def convert_sharegpt(
    record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin, *, good: bool = True
) -> Conversation:
    messages, role_names, field = read_turns(record, fields, tags, origin)
    tools = parse_tools(record, fields["tools"], origin)
    turns = with_tool_use(messages, tools, origin, field, role_names, calls_in_text=True, good=good)
    return Conversation(turns, origin, tools, read_variables(record, fields, origin))


def read_turns(
    record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin
) -> tuple[list[Message], list[str], str]:
    """The messages of a record, the speakers as it names them, and the field that has them. Each is checked by itself;
    the order of roles is not."""
    field = fields["conversations"] or "conversations"
    turns = list_field(record, field, origin, "turns")
    keys, speakers = _keys(turns, tags), _speakers(tags)
    messages, role_names = [], []
    for index, turn in enumerate(turns):
        message, role_name = _turn(turn, keys, speakers, origin, f"{field}[{index}]")
        messages.append(message)
        role_names.append(role_name)
    all_messages = with_system(messages, record, fields, origin)
    return all_messages, ["system"] * (len(all_messages) - len(messages)) + role_names, field


def _keys(turns: Sequence[object], tags: Mapping[str, str]) -> tuple[str, str]:
    """The keys of speaker and text in a turn: those of the tags, or from/value, or role/content where turns have those
    instead."""
    role, content = tags.get("role_tag"), tags.get("content_tag")
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    if role is None and content is None and "from" not in first and "role" in first:
        return "role", "content"
    return role or TAGS["role_tag"], content or TAGS["content_tag"]


def _speakers(tags: Mapping[str, str]) -> dict[str, str]:
    """The names of speakers in a record -> the tag of each."""
    speakers = {}
    for tag in SPEAKER_ROLES:
        speakers[tags.get(tag, TAGS[tag])] = tag
        if tag in SYNONYMS and tag not in tags:
            speakers.setdefault(SYNONYMS[tag], tag)
    return speakers


def _turn(
    turn: object, keys: tuple[str, str], speakers: Mapping[str, str], origin: Origin, field: str
) -> tuple[Message, str]:
    """The message of a turn, and its speaker as the record names it."""
    role_key, content_key = keys
    if not isinstance(turn, dict):
        problem = f"expected a turn, found {describe(turn)}"
        raise field_error(problem, origin, field, f'write {{"{role_key}": ..., "{content_key}": ...}}')
    for key in keys:
        if key not in turn:
            problem = f"the turn has no '{key}'; its fields are: {', '.join(turn) or 'none'}"
            misspelt = next((name for name in turn if name not in keys and nearest(name, (key,))), None)
            fix = f"rename '{misspelt}' to {key}" if misspelt else "add it"
            fix += ", or set tags: {role_tag: ..., content_tag: ...}"
            raise field_error(problem, origin, f"{field}.{key}", fix)
    name = turn[role_key]
    tag = speakers.get(name) if isinstance(name, str) else None
    if tag is None:
        hint = nearest(name, speakers) if isinstance(name, str) else ""
        raise field_error(
            f"unknown role {json.dumps(name, ensure_ascii=False)}",
            origin,
            f"{field}.{role_key}",
            f"{hint}known: {', '.join(speakers)}; set tags for other names of roles, e.g. user_tag",
        )
    check_turn(turn, origin, field)
    for key in MESSAGE_FIELDS:
        if key not in keys and not is_blank(turn.get(key)):
            problem = f"the field is not read from turns of sharegpt: {describe(turn[key])}"
            fix = "write turns of role and content, and set format: messages, columns: {messages: NAME}; or remove it"
            raise field_error(problem, origin, f"{field}.{key}", fix.replace("NAME", field.partition("[")[0]))
    weight, content_field = weight_field(turn, origin, field), f"{field}.{content_key}"
    content = turn[content_key]
    if tag == "function_tag":
        reasoning, calls = split_reasoning(content) if isinstance(content, str) else ("", content)
        extra = (("reasoning_content", reasoning),) if reasoning else ()
        return Message("assistant", "", weight, _turn_calls(calls, origin, content_field), extra), name
    if tag == "observation_tag" and isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    # A tool may return nothing, and an empty system prompt keeps a template from inserting its own.
    content = check_text(content, origin, content_field, required=tag in ("user_tag", "assistant_tag"))
    return Message(SPEAKER_ROLES[tag], content, weight), name


def _turn_calls(content: object, origin: Origin, field: str) -> tuple[JsonObject, ...]:
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            problem = f"the function call is not JSON ({error}): {str(content)[:60]!r}"
            fix = 'write {"name": ..., "arguments": {...}}, or a list of such objects'
            raise field_error(problem, origin, field, fix) from None
    calls = content if isinstance(content, list) else [content]
    if not calls:
        problem = "the list of function calls is empty"
        raise field_error(problem, origin, field, "write the call, or remove the turn")
    return tuple(parse_tool_call(call, origin, field) for call in calls)


SHAREGPT = RecordFormat(
    name="sharegpt",
    expects="conversations: a list of {from: human|gpt|system|function_call|observation, value: text}; system, tools",
    fields=same_names("conversations", "tools") | CONTEXT,
    required=("conversations",),
    aliases={"messages": "conversations"},
    tags=TAGS,
    detect=detect_sharegpt,
    convert=convert_sharegpt,
    convert_bad=functools.partial(convert_sharegpt, good=False),
)
