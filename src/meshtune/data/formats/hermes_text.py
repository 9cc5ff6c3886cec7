"""Tools, calls and results as text in the tags of Hermes' prompt: <tools>, <tool_call> and <tool_response>.

Where a record declares its tools in a field, its chat template writes them, its calls and their results in its
own form, so that text in these tags is read as its meaning. Calls are JSON or, as in Hermes' data, Python literals.
Specification: github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence

from meshtune.data.conversation import Message, Origin
from meshtune.data.formats.record import field_error
from meshtune.data.formats.tools import parse_tool_call

_TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>\s*", re.DOTALL)
_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


def tools_of_text(text: str, origin: Origin, field: str) -> list[object] | None:
    """The tools between <tools> and </tools>, a list of them or one a line; None without such a part.

    Raises UserError where they are neither JSON nor Python literals.
    """
    part = _TOOLS.search(text)
    if part is None:
        return None
    try:
        value = _literal(part[1])
    except ValueError:
        value = [
            _parse_call(line, "the tools in <tools>", origin, field) for line in part[1].splitlines() if line.strip()
        ]
    return value if isinstance(value, list) else [value]


def check_tools_are_given_once(messages: Sequence[Message], origin: Origin, field: str) -> None:
    """Raises UserError for a system prompt that lists tools although the record declares them too."""
    if messages and messages[0].role == "system" and _TOOLS.search(messages[0].content):
        raise field_error(
            "the system prompt lists tools in <tools>, and the record declares tools too: they would be written twice",
            origin,
            field,
            "set format: hermes, which leaves such a system prompt to the chat template; or, to train on the text as "
            "it is, columns: {tools: null}",
        )


def calls_of_text(message: Message, origin: Origin, field: str) -> Message:
    """The message with the calls that end its text as tool calls; other messages unchanged.

    Raises UserError where such a call is malformed.
    """
    start = message.content.find("<tool_call>")
    if message.tool_calls or start < 0:
        return message
    blocks, end = [], start
    while block := _CALL.match(message.content, end):
        blocks.append(block[1])
        end = block.end()
    if not blocks or message.content[end:].strip():
        return message  # text about calls, or calls of another form
    calls = [
        parse_tool_call(_parse_call(block, "the call in <tool_call>", origin, field), origin, field) for block in blocks
    ]
    return dataclasses.replace(message, content=message.content[:start].rstrip(), tool_calls=tuple(calls))


def with_text_read(messages: Sequence[Message], origin: Origin, field: str) -> list[Message]:
    """The messages with calls in their text as tool calls, and with a user's turns after them that are nothing but
    <tool_response> as results."""
    read: list[Message] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            message = calls_of_text(message, origin, f"{field}[{index}]")
        elif message.role == "user" and read and read[-1].tool_calls and _results(message.content):
            message = dataclasses.replace(message, role="tool")
        read.append(message)
    return read


def results_of_text(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with results without <tool_response> tags, which templates write themselves; several results of one
    message are a message each where as many calls come before them."""
    calls = 0
    for message in messages:
        if message.role != "tool":
            calls = len(message.tool_calls)
            yield message
            continue
        results = _results(message.content)
        if not results:
            yield message
        elif len(results) == calls and "tool_call_id" not in dict(message.extra):
            yield from (dataclasses.replace(message, content=result) for result in results)
        else:
            yield dataclasses.replace(message, content="\n".join(results))


def _results(content: str) -> list[str]:
    """The texts in <tool_response> tags, [] where there is anything else."""
    results, end = [], 0
    while block := _RESULT.match(content, end):
        results.append(block[1])
        end = block.end()
    return results if end == len(content) else []


def _parse_call(text: str, name: str, origin: Origin, field: str) -> object:
    try:
        return _literal(text)
    except ValueError as error:
        fix = 'write {"name": ..., "arguments": {...}}'
        raise field_error(f"{name}: not JSON ({error}): {text[:60]!r}", origin, field, fix) from None


def _literal(text: str) -> object:
    """The value of JSON text, or of a Python literal. Raises ValueError where it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(str(problem)) from None
