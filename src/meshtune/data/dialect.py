"""How chat templates write tool calls, results and reasoning, and the place of reasoning in a message.

Templates differ in more than their text: DeepSeek's concatenate arguments as text, R1's write calls only where the
content is null, Mistral's demand ids of nine characters, gpt-oss reads reasoning from `thinking`, and others ignore
tools. Each property is measured by rendering short conversations with unique words, never by searching in the template.

Where the prompt of generation holds the opening tag, as DeepSeek R1's and Qwen3's thinking models have it, completions
have only the closing tag, on a line of its own or at the end of the last one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence

from meshtune.config.data_options import Reasoning
from meshtune.data.conversation import Conversation, JsonObject, Message, in_order_of_calls, tool_name
from meshtune.errors import UserError

Messages = Sequence[Mapping[str, object]]
Render = Callable[[Messages, Sequence[JsonObject]], str | None]
"""The text of messages and tools; None where the template refuses them."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_NAME, _KEY, _VALUE, _RESULT, _THOUGHT = "probename", "probekey", "probevalue", "proberesult", "probethought"
_PROBE = "probewords"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string", "description": "Text."}}, "required": [_KEY]}
_TOOL: JsonObject = {
    "type": "function",
    "function": {"name": _NAME, "description": "A function.", "parameters": _PARAMETERS},
}
_USER: JsonObject = {"role": "user", "content": "question"}
NO_ARGUMENT = object()
_IDS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The forms that a chat template reads and writes.

    `arguments_as_text`: arguments are JSON text, not an object. `empty_content` is the content of a turn that only
    calls tools. `id_length`: the length that ids of calls must have. `reasoning_key` is the field of a message in
    which it looks for reasoning, None where it writes none; `think_tags` says that it writes reasoning in <think> tags.
    `writes_text` says that it writes the text of a turn of calls, and not after their results as Gemma 4's does.
    `call_end` is the text that ends every turn of calls.
    """

    arguments_as_text: bool = False
    empty_content: str | None = ""
    id_length: int | None = None
    writes_tools: bool = False
    writes_calls: bool = False
    writes_results: bool = False
    writes_text: bool = False
    reasoning_key: str | None = None
    think_tags: bool = False
    call_end: str = ""

    def messages(self, conversation: Conversation) -> list[dict[str, object]]:
        """The messages of a conversation as the template reads them."""
        return self.adapt([as_dict(message) for message in conversation.messages])

    def adapt(self, messages: Messages) -> list[dict[str, object]]:
        """Messages in OpenAI's form, arguments as objects, as the template reads them; results name their tool and
        follow in the order of their calls."""
        names: dict[str, str] = {}
        waiting: list[tuple[str | None, str]] = []
        adapted, count = [], 0
        for message in (messages[index] for index in in_order_of_calls(messages)):
            fields = self._fields(message)
            calls_of_message = message.get("tool_calls")
            if isinstance(calls_of_message, list | tuple) and calls_of_message:
                calls = [
                    self._call(call, count + n, len(calls_of_message) > 1) for n, call in enumerate(calls_of_message)
                ]
                fields["tool_calls"], count = calls, count + len(calls)
                waiting = [(_id(call), tool_name(call)) for call in calls]
                names |= {str(call["id"]): tool_name(call) for call in calls_of_message if "id" in call}
            elif message["role"] == "tool":
                self._link(fields, names, waiting)
            adapted.append(fields)
        return adapted

    def _fields(self, message: Mapping[str, object]) -> dict[str, object]:
        fields = dict(message)
        if message.get("tool_calls") and not message.get("content"):
            fields["content"] = self.empty_content
        reasoning = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
        if reasoning is not None and message["role"] == "assistant":
            fields = {key: value for key, value in fields.items() if key not in REASONING_KEYS}
            fields[self.reasoning_key or REASONING_KEYS[0]] = reasoning
        return fields

    def _call(self, call: JsonObject, number: int, several: bool) -> JsonObject:
        """A call as the template reads it, with an id if it has one, if the template demands it, or if results need it
        to name their call."""
        function = call["function"]
        assert isinstance(function, Mapping)
        if self.arguments_as_text:
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        id_ = call.get("id")
        if self.id_length is not None or (id_ is None and several):
            id_ = id_of_length(f"call {number}" if id_ is None else str(id_), self.id_length or 9)
        return {**call, "function": function} | ({} if id_ is None else {"id": id_})

    def _link(self, fields: dict[str, object], names: Mapping[str, str], waiting: list[tuple[str | None, str]]) -> None:
        """Names the tool of a result, and gives it the id of its call in the form that the template wants."""
        id_ = fields.get("tool_call_id")
        if isinstance(id_, str):
            fields["tool_call_id"] = id_ if self.id_length is None else id_of_length(id_, self.id_length)
            match = next((entry for entry in waiting if entry[0] == fields["tool_call_id"]), None)
        else:
            match = waiting[0] if waiting else None
        if match is not None:
            waiting.remove(match)
            fields.setdefault("name", match[1])
            if match[0] is not None:
                fields["tool_call_id"] = match[0]
        elif isinstance(id_, str) and id_ in names:
            fields.setdefault("name", names[id_])


def as_dict(message: Message) -> dict[str, object]:
    """A message in OpenAI's form; a picture is a part {"type": "image"}."""
    content = message.parts if message.pictures else message.content
    fields: dict[str, object] = {"role": message.role, "content": content, **dict(message.extra)}
    if message.tool_calls:
        fields["tool_calls"] = list(message.tool_calls)
    return fields


def id_of_length(id_: str, length: int) -> str:
    """`id_` if it has `length` letters and digits, else as many made from it."""
    if len(id_) == length and id_.isascii() and id_.isalnum():
        return id_
    number = int.from_bytes(hashlib.sha256(id_.encode()).digest())
    return "".join(_IDS[number // len(_IDS) ** place % len(_IDS)] for place in range(length))


def measure(render: Render) -> Dialect:
    """The dialect of the template that `render` renders."""
    dialect = _call_dialect(render)
    if dialect is None:
        return dataclasses.replace(_with_reasoning(render, Dialect()), writes_tools=_writes_tools(render))
    results = render([_USER, *call_and_results(dialect, _VALUE), {"role": "assistant", "content": "answer"}], ())
    return dataclasses.replace(
        _with_reasoning(render, dialect),
        writes_tools=_writes_tools(render),
        writes_results=results is not None and _RESULT in results,
        writes_text=_writes_text(render, dialect),
        call_end=_call_end(render, dialect),
    )


def _call_dialect(render: Render) -> Dialect | None:
    """The first way of giving calls that the template writes in full."""
    for id_length, as_text, content in itertools.product((None, 9), (False, True), ("", None)):
        dialect = Dialect(as_text, content, id_length, writes_calls=True)
        for turns in (call_and_results(dialect, _VALUE)[:1], call_and_results(dialect, _VALUE)):
            text = render([_USER, *turns], ())
            # A mapping that a template concatenates is written as Python does, with single quotes.
            if text is None or not all(word in text for word in (_NAME, _KEY, _VALUE)) or f"'{_KEY}'" in text:
                break
        else:
            return dialect
    return None


def call_and_results(dialect: Dialect, *values: object, name: str = _NAME) -> list[dict[str, object]]:
    """A turn that calls a tool once per value of its argument, and the results, as the template reads them."""
    calls: list[JsonObject] = [
        {
            "type": "function",
            "id": f"{name} {n}",
            "function": {"name": name, "arguments": {} if value is NO_ARGUMENT else {_KEY: value}},
        }
        for n, value in enumerate(values)
    ]
    results = [Message("tool", _RESULT, extra=(("tool_call_id", str(call["id"])),)) for call in calls]
    turns = (Message("assistant", "", tool_calls=tuple(calls)), *results)
    return dialect.messages(Conversation(turns, origin=None))  # pyright: ignore[reportArgumentType] - no record


def _writes_tools(render: Render) -> bool:
    text = render([_USER, {"role": "assistant", "content": "answer"}], [_TOOL])
    return text is not None and _NAME in text and _KEY in text


def _writes_text(render: Render, dialect: Dialect) -> bool:
    call, *results = call_and_results(dialect, _VALUE)
    text = render([_USER, {**call, "content": _PROBE}, *results], ())
    return text is not None and _PROBE in text.partition(_RESULT)[0]


def _with_reasoning(render: Render, dialect: Dialect) -> Dialect:
    """The dialect with the field of a message from which the template writes reasoning, if it does."""
    for key in REASONING_KEYS:
        turns: list[dict[str, object]] = [{"role": "assistant", "content": "answer", key: _THOUGHT}]
        if dialect.writes_calls:
            turns.append({**call_and_results(dialect, _VALUE)[0], key: _THOUGHT})
        for turn in turns:
            text = render([_USER, turn], ())
            if text is not None and _THOUGHT in text:
                return dataclasses.replace(dialect, reasoning_key=key, think_tags="</think>" in text)
    return dialect


def _call_end(render: Render, dialect: Dialect) -> str:
    """The text that turns of different calls end with, without the white space after it."""
    arguments = {_NAME: _VALUE, "other": 5, "third": {"a": []}, "fourth": NO_ARGUMENT}
    turns = [call_and_results(dialect, value, name=name)[0] for name, value in arguments.items()]
    texts = [text.rstrip() for turn in turns if (text := render([_USER, turn], ())) is not None]
    if len(texts) < 2:
        return ""
    equal = [len(set(characters)) == 1 for characters in zip(*(text[::-1] for text in texts), strict=False)]
    length = equal.index(False) if False in equal else len(equal)
    return texts[0][len(texts[0]) - length :]


def _id(call: JsonObject) -> str | None:
    return call["id"] if isinstance(call.get("id"), str) else None  # pyright: ignore[reportReturnType]


_BEFORE_A_MENTION = frozenset(" \t\"'`(\u201c\u2018\u00ab")
_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def split_reasoning(content: str) -> tuple[str, str]:
    """The text of a <think> block that begins `content`, without the white space around it, and what follows it. The
    opening tag may be missing, but not where an answer merely mentions the closing one."""
    block = _BLOCK.match(content)
    if block:
        return block.group(1).strip(), content[block.end() :]
    before, tag, after = content.partition("</think>")
    if not tag or "<think>" in before or before.count("```") % 2:
        return "", content
    begins_line = before.rstrip(" ").endswith("\n")
    ends_line = not after.strip(" ") or after.lstrip(" ").startswith("\n")
    if not begins_line and (not ends_line or before[-1:] in _BEFORE_A_MENTION):
        return "", content
    return before.strip(), after.lstrip()


def reasoning_of(message: Message) -> str:
    """The reasoning of an assistant's turn in its own field, "" without one."""
    if message.role != "assistant":
        return ""
    return next((value for key, value in message.extra if key in REASONING_KEYS and isinstance(value, str)), "")


def has_reasoning(message: Message) -> bool:
    """Whether an assistant's turn has reasoning, in a field or as text that ends with </think>."""
    return message.role == "assistant" and ("</think>" in message.content or bool(reasoning_of(message)))


def with_reasoning(conversation: Conversation, choice: Reasoning, dialect: Dialect | None) -> Conversation:
    """The conversation with its reasoning where `choice` wants it; `dialect` is the template's, for choice "template".

    Raises UserError for a turn that is empty without its reasoning.
    """
    messages = []
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            messages.append(message)
            continue
        match choice:
            case "drop":
                messages.append(_without(message, index, conversation))
            case "inline":
                messages.append(_inline(message))
            case "template":
                messages.append(_in_field(message, dialect))
    return dataclasses.replace(conversation, messages=tuple(messages))


def _without(message: Message, index: int, conversation: Conversation) -> Message:
    _, answer = split_reasoning(message.content)
    if not answer.strip() and not message.tool_calls:
        raise UserError(
            f"nothing is left of the assistant's turn {index} without its reasoning",
            where=str(conversation.origin),
            fix="set data.reasoning: template, or data.on_bad=skip to leave such records out",
        )
    return dataclasses.replace(message, content=answer, extra=_other_fields(message))


def _inline(message: Message) -> Message:
    reasoning, answer = reasoning_of(message).strip(), message.content
    if not reasoning and not _BLOCK.match(answer):
        reasoning, answer = split_reasoning(answer)  # of which the opening tag is missing
    if not reasoning:
        return message
    content = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    return dataclasses.replace(message, content=content, extra=_other_fields(message))


def _in_field(message: Message, dialect: Dialect | None) -> Message:
    """The message with <think> text in the field that the template reads, if it writes reasoning in its own form, or
    if the opening tag is missing."""
    if dialect is None or dialect.reasoning_key is None or reasoning_of(message):
        return message
    if dialect.think_tags and _BLOCK.match(message.content):
        return message
    reasoning, answer = split_reasoning(message.content)
    if not reasoning:
        return message
    extra = (*_other_fields(message), (dialect.reasoning_key, reasoning))
    return dataclasses.replace(message, content=answer, extra=extra)


def _other_fields(message: Message) -> tuple[tuple[str, object], ...]:
    return tuple((key, value) for key, value in message.extra if key not in REASONING_KEYS)
