"""Formats of conversations: OpenAI's messages, ShareGPT's turns, Hermes' and xLAM's function calls.

Content is text or a list of parts, text and pictures; LLaMA-Factory's parts ({"type": "text", "reasoning" or
"tool_call", "value": ...}) and its `loss_weight` are understood too. Keys beyond these are kept in `Message.extra` for
the chat template.

`function_call` turns are an assistant's tool calls (JSON text of one call or a list, after a <think> block or none),
`observation` turns the tools' results. The speakers user, assistant and tool are also understood, unless a tag renames
them.

The system prompt is left out, since it says what the chat template writes in its own words: the tools and the form of
calls. Tools come from the field `tools`, else from the prompt. Records without such a prompt are read as ShareGPT.
Specification: github.com/NousResearch/Hermes-Function-Calling.

Specification: the card of the data set Salesforce/xlam-function-calling-60k.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence

from meshtune.data.conversation import Conversation, JsonObject, Message, Origin, PlacedPicture, Role
from meshtune.data.dialect import split_reasoning
from meshtune.data.formats.record import (
    CONTEXT,
    SWITCHES,
    WEIGHTS,
    FieldNames,
    Record,
    RecordFormat,
    check_text,
    check_turn,
    check_turns,
    describe,
    field_error,
    has_fields,
    is_blank,
    list_field,
    missing_field_error,
    only_by_name,
    parse_json,
    read_variables,
    same_names,
    text_field,
    weight_field,
    with_system,
)
from meshtune.data.formats.tools import call_id, parse_tool_call, parse_tools, tools_of_text, with_tool_use
from meshtune.errors import UserError, nearest
from meshtune.lazy import LazyFunction

MESSAGE_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
KNOWN_KEYS = {"role", "content", "tool_calls", "function_call", *WEIGHTS, *SWITCHES}
PICTURE_PARTS = ("image", "image_url", "input_image")
part_picture = LazyFunction("meshtune.data.formats.pictures:part_picture")
# Parts that are refused -> what to do instead.
MEDIA_PARTS = dict.fromkeys(("video", "video_url"), "give frames of it as pictures, in parts of type image_url")
MEDIA_PARTS |= dict.fromkeys(("audio", "audio_url", "input_audio"), "write what is heard in it as text, or remove it")
MEDIA_PARTS |= {"file": "give its pages as pictures, in parts of type image_url, or as text"}


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
    if fields.get("system") in record:
        messages = with_system(messages, record, fields, origin)
    has_tools = any(record.get(name) is not None for key in ("tools", "functions") if (name := fields[key]))
    tools = _read_tools(record, fields, origin) if has_tools else ()
    if tools or any(message.tool_calls or message.role == "tool" for message in messages):
        messages = with_tool_use(messages, tools, origin, field, good=good)
    else:
        check_turns(messages, origin, field)
    variables = read_variables(record, fields, origin) if fields.get("chat_template_kwargs") in record else {}
    return Conversation(tuple(messages), origin, tools, variables)


def _read_tools(record: Record, fields: FieldNames, origin: Origin) -> tuple[Mapping[str, object], ...]:
    tools, functions = (parse_tools(record, fields[key], origin) for key in ("tools", "functions"))
    if tools and functions:
        raise _two_lists_error(origin, fields["functions"] or "functions")
    return tools or functions


def _two_lists_error(origin: Origin, field: str) -> UserError:
    return field_error("the record has tools, and functions as well", origin, field, "remove one of the two")


def read_messages(turns: Sequence[object], origin: Origin, field: str) -> list[Message]:
    """Reads and checks each message by itself; the order of roles is not checked."""
    return [_message(turn, origin, f"{field}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: object, origin: Origin, field: str) -> Message:
    if not isinstance(turn, dict):
        problem = f"expected a message, found {describe(turn)}"
        raise field_error(problem, origin, field, 'write {"role": ..., "content": ...}')
    role, content = _role(turn, origin, field), turn.get("content")
    if len(turn) == 2 and isinstance(content, str):
        return Message(role, check_text(content, origin, f"{field}.content", required=role in ("user", "assistant")))
    return _rich_message(turn, role, content, origin, field)


def _rich_message(turn: dict[str, object], role: Role, content: object, origin: Origin, field: str) -> Message:
    """A message that has more than a text, or none."""
    check_turn(turn, origin, field)
    pictures = list[PlacedPicture]()
    extra = {key: value for key, value in turn.items() if key not in KNOWN_KEYS and value is not None}
    if "tool_call_id" in turn:
        call_id(turn, "tool_call_id", origin, field)
    calls = _calls(turn, origin, field) if turn.get("tool_calls") or turn.get("function_call") else []
    if isinstance(content, list):
        in_answer = role == "assistant"
        content = _parts(content, origin, f"{field}.content", calls, extra, None if in_answer else pictures)
    if role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    if calls and role != "assistant":
        problem = f"tool calls in a message of {turn['role']}"
        raise field_error(problem, origin, f"{field}.tool_calls", "only an assistant calls tools")
    if not content and not calls and not pictures:
        _check_content(turn, role, content, extra, origin, field)
    if content is None and calls:
        content = ""
    required = not pictures and (role == "user" or (role == "assistant" and not calls))
    content = check_text(content, origin, f"{field}.content", required=required)
    weight = weight_field(turn, origin, field)
    return Message(role, content, weight, tuple(calls), tuple(extra.items()), tuple(pictures))


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
    parts: list[object],
    origin: Origin,
    field: str,
    calls: list[dict[str, object]],
    extra: dict[str, object],
    pictures: list[PlacedPicture] | None,
) -> str | None:
    """The text of a list of content parts. Reasoning is added to `extra`, tool calls to `calls`, and pictures to
    `pictures`, of which an answer has none (None)."""
    texts, reasoning = [], []
    for index, part in enumerate(parts):
        item = f"{field}[{index}]"
        if not isinstance(part, dict) or not part.get("type"):
            raise field_error(f"not a text part: {describe(part)}", origin, item, 'write {"type": "text", "text": ...}')
        part_type = part["type"]
        value = next((part[key] for key in ("text", "value") if part.get(key) is not None), None)
        if part_type in PICTURE_PARTS and pictures is None:
            problem = f"a part of type '{part_type}' in an answer: models answer in words"
            raise field_error(problem, origin, item, "move it into a turn of the user, or remove it")
        if part_type in PICTURE_PARTS:
            assert pictures is not None
            offset = sum(map(len, texts))
            pictures.append(PlacedPicture(offset, part_picture(part, origin, item)))
            continue
        if part_type in MEDIA_PARTS:
            problem = f"a part of type '{part_type}', and only text and pictures can be trained on"
            raise field_error(problem, origin, item, MEDIA_PARTS[part_type])
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
    return "".join(texts) if texts or pictures or not calls else None


MESSAGES = RecordFormat(
    name="messages",
    expects="messages: a list of {role: system|user|assistant|tool, content: text}; also tool_calls, weight, tools",
    fields=same_names("messages", "tools", "functions") | CONTEXT,
    required=("messages",),
    detect=detect_messages,
    convert=convert_messages,
    convert_bad=functools.partial(convert_messages, good=False),
)


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
    pictures = list[PlacedPicture]()
    if isinstance(content, list) and tag == "user_tag":
        content = _parts(content, origin, content_field, [], {}, pictures)
    # A tool may return nothing, and an empty system prompt keeps a template from inserting its own.
    required = tag in ("user_tag", "assistant_tag") and not pictures
    content = check_text(content, origin, content_field, required=required)
    return Message(SPEAKER_ROLES[tag], content, weight, pictures=tuple(pictures)), name


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


LISTED = "<tools> of the system prompt"


def convert_hermes(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation:
    messages, role_names, field = read_turns(record, fields, tags, origin)
    tools = parse_tools(record, fields["tools"], origin)
    listed = tools_of_text(messages[0].content, origin, LISTED) if messages[0].role == "system" else None
    if listed is not None and len(messages) > 1:
        messages, role_names = messages[1:], role_names[1:]
        tools = tools or parse_tools({LISTED: listed}, LISTED, origin)
    turns = with_tool_use(messages, tools, origin, field, role_names, calls_in_text=True)
    return Conversation(turns, origin, tools, read_variables(record, fields, origin))


HERMES = dataclasses.replace(
    SHAREGPT,
    name="hermes",
    expects="conversations whose system turn lists tools in <tools>; calls in <tool_call>; only where it is named",
    detect=only_by_name,
    convert=convert_hermes,
    convert_bad=None,
)


def convert_xlam(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation:
    field = fields["answers"] or "answers"
    answers = record.get(field)
    if answers is None:
        raise missing_field_error(record, field, origin)
    if isinstance(answers, str):
        answers = parse_json(answers, origin, field)
    if not isinstance(answers, list) or not answers:
        problem = f"expected a list of calls, found {describe(answers)}"
        raise field_error(problem, origin, field, 'write [{"name": ..., "arguments": {...}}], or remove the record')
    calls = tuple(parse_tool_call(call, origin, f"{field}[{index}]") for index, call in enumerate(answers))
    tools = parse_tools(record, fields["tools"], origin)
    turns = [
        Message("user", text_field(record, fields["query"] or "query", origin)),
        Message("assistant", "", tool_calls=calls),
    ]
    messages = with_system(turns, record, fields, origin)
    variables = read_variables(record, fields, origin)
    return Conversation(with_tool_use(messages, tools, origin, field), origin, tools, variables)


XLAM = RecordFormat(
    name="xlam",
    expects="query, text; answers, a list of {name, arguments}, and tools, each also as JSON text",
    fields=same_names("query", "answers", "tools") | CONTEXT,
    required=("query", "answers"),
    detect=has_fields("query", "answers", "tools"),
    convert=convert_xlam,
)
