"""Tools, calls and results of a record in OpenAI's form, from fields or from text in Hermes' tags.

Where a record declares its tools in a field, its chat template writes them, its calls and their results in its
own form, so that text in these tags is read as its meaning. Calls are JSON or, as in Hermes' data, Python literals.
Specification: github.com/NousResearch/Hermes-Function-Calling.

Types are Python's there. Templates that write parameters in words of their own (Gemma 4, gpt-oss) read schemas alone
and would leave such ones out. Specification: the card of the data set Salesforce/xlam-function-calling-60k.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from meshtune.data.conversation import JsonObject, Message, Origin, in_order_of_calls, tool_name
from meshtune.data.dialect import as_dict
from meshtune.data.formats.record import Record, check_turns, describe, field_error, is_blank, parse_json
from meshtune.errors import nearest

TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
TYPES |= dict.fromkeys(("list", "tuple", "set"), "array")
_OPTIONAL = re.compile(r",\s*optional\s*$", re.IGNORECASE)


def is_schema(parameters: Mapping[str, object]) -> bool:
    """Whether parameters are a JSON schema (or empty), not descriptions of each by its name."""
    described = [isinstance(value, Mapping) and isinstance(value.get("type"), str) for value in parameters.values()]
    return not described or not all(described)


def as_schema(parameters: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The JSON schema of described parameters. One without a default whose type is not called optional is required."""
    properties = {name: _property(parameter) for name, parameter in parameters.items()}
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    return {"type": "object", "properties": properties, "required": required}


def _property(parameter: Mapping[str, object]) -> dict[str, object]:
    name = _OPTIONAL.sub("", str(parameter["type"])).strip()
    base, _, item = name.partition("[")
    fields = {key: value for key, value in parameter.items() if key not in ("type", "required")}
    schema: dict[str, object] = {"type": TYPES.get(base.lower(), name), **fields}
    if schema["type"] == "array" and (kind := TYPES.get(item.removesuffix("]").lower())):
        schema["items"] = {"type": kind}
    return schema


def _is_required(parameter: Mapping[str, object]) -> bool:
    required = parameter.get("required")
    if isinstance(required, bool):
        return required
    return "default" not in parameter and "optional" not in str(parameter.get("type", "")).lower()


def parse_tools(record: Record, field: str | None, origin: Origin) -> tuple[Mapping[str, object], ...]:
    """The tools under `field` in OpenAI's form, from JSON text or a list.

    Bare functions are wrapped, and parameters that are described by name become a JSON schema. () where the records
    have no such field, or it is null or blank. Raises UserError where it is malformed.
    """
    value = record.get(field) if field else None
    return () if not field or is_blank(value) else _parse_tools(value, field, origin)


def _parse_tools(value: object, field: str, origin: Origin) -> tuple[Mapping[str, object], ...]:
    if isinstance(value, str):
        value = parse_json(value, origin, field)
    if not isinstance(value, list):
        problem = f"expected a list of tools, found {describe(value)}"
        raise field_error(problem, origin, field, "write a JSON list of function schemas")
    tools = tuple(_parse_tool(tool, origin, f"{field}[{index}]") for index, tool in enumerate(value))
    names = [tool_name(tool) for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            problem, fix = f"a second tool of the name '{name}'", "remove one of the two, or give it another name"
            raise field_error(problem, origin, f"{field}[{index}].name", fix)
    return tools


def _parse_tool(tool: object, origin: Origin, field: str) -> Mapping[str, object]:
    if isinstance(tool, str):
        tool = parse_json(tool, origin, field)
    if not isinstance(tool, dict):
        problem = f"expected a function schema, found {describe(tool)}"
        raise field_error(problem, origin, field, "write an object with a name")
    wrapped = isinstance(tool.get("function"), dict)
    function = tool["function"] if wrapped else tool
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise field_error("the function has no name", origin, f"{field}.name", "name it")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        problem = f"expected a JSON schema, found {describe(parameters)}"
        raise field_error(problem, origin, f"{field}.parameters", 'write {"type": "object", "properties": {...}}')
    if parameters is not None and not is_schema(parameters):
        function = {**function, "parameters": as_schema(parameters)}
    return {**tool, "function": function} if wrapped else {"type": "function", "function": function}


def parse_tool_call(value: object, origin: Origin, field: str) -> dict[str, object]:
    """A call as {"type": "function", "function": {"name", "arguments"}}, with its id if it has one.

    Arguments become an object, as the chat templates of `transformers` expect; OpenAI's JSON text of them is parsed.
    Raises UserError where the call is malformed.
    """
    if isinstance(value, str):
        value = parse_json(value, origin, field)
    if not isinstance(value, dict):
        problem = f"expected a function call, found {describe(value)}"
        raise field_error(problem, origin, field, 'write {"name": ..., "arguments": {...}}')
    function, id_ = value, call_id(value, "id", origin, field)
    if isinstance(value.get("function"), dict):
        function, field = value["function"], f"{field}.function"
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        problem = "the function call has no name"
        raise field_error(problem, origin, f"{field}.name", 'write {"name": ..., "arguments": {...}}')
    if isinstance(arguments, str):
        arguments = parse_json(arguments, origin, f"{field}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        problem = f"expected an object of arguments, found {describe(arguments)}"
        raise field_error(problem, origin, f"{field}.arguments", "write them as {name: value}")
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        problem = "the arguments have a number that is NaN or infinite, which JSON has not"
        raise field_error(problem, origin, f"{field}.arguments", "write null, or a text") from None
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if id_ is None else {"id": id_, **call}


def call_id(value: Mapping[str, object], key: str, origin: Origin, field: str) -> str | None:
    """The id of a call under `key`, None without one. Raises UserError where it is no text."""
    id_ = value.get(key)
    if id_ is not None and not isinstance(id_, str):
        problem = f"expected the id of a call as text, found {describe(id_)}"
        raise field_error(problem, origin, f"{field}.{key}", "write it in quotes, in the call and in its result")
    return id_


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


def with_tool_use(
    messages: Sequence[Message],
    tools: Sequence[JsonObject],
    origin: Origin,
    field: str,
    role_names: Sequence[str] | None = None,
    *,
    calls_in_text: bool = False,
    good: bool = True,
) -> tuple[Message, ...]:
    """The messages of a record in OpenAI's form: calls and results that are written as text in Hermes' tags are read
    where the record declares its tools, and results follow in the order of their calls. The last turn may call tools
    that do not exist where it is not `good`.

    Raises UserError for a wrong order of roles, and as `check_tool_use`.
    """
    if tools:
        check_tools_are_given_once(messages, origin, field)
        messages = with_text_read(messages, origin, field)
    check_turns(messages, origin, field, role_names, calls_in_text=calls_in_text)
    if not tools and not any(message.tool_calls or message.role == "tool" for message in messages):
        return tuple(messages)
    check_tool_use(messages, tools, origin, field, good=good)
    messages = list(results_of_text(messages))
    return tuple(messages[index] for index in in_order_of_calls([as_dict(message) for message in messages]))


def check_tool_use(
    messages: Sequence[Message], tools: Sequence[JsonObject], origin: Origin, field: str, *, good: bool = True
) -> None:
    """Raises UserError for a call of a tool that the record does not declare, for a result that is of no call, and for
    a call without a result where results name the turn's other calls.

    Records without tools may describe them in the system prompt; calls may be written in an assistant's text.
    """
    declared = [tool_name(tool) for tool in tools]
    waiting: list[object] = []
    calling, linked = None, False  # the turn of the last calls; whether results name the ids of theirs
    for index, message in enumerate(messages):
        where = f"{field}[{index}]"
        if message.role != "tool":
            _check_none_waits(waiting if linked else [], origin, f"{field}[{calling}]")
        if message.role == "assistant":
            for name in map(tool_name, message.tool_calls):
                if declared and name not in declared and (good or index + 1 < len(messages)):
                    hint = nearest(name, declared)
                    fix = f"{hint}declare it in tools, which has: {', '.join(declared)}"
                    raise field_error(f"a call of '{name}', which the record does not declare", origin, where, fix)
            waiting, calling, linked = _ids(message, origin, where), index if message.tool_calls else None, False
        elif message.role == "tool" and calling is not None:
            linked |= _check_result(message, waiting, origin, where)
    _check_none_waits(waiting if linked else [], origin, f"{field}[{calling}]")


def _ids(message: Message, origin: Origin, where: str) -> list[object]:
    """The ids of the calls of a turn, None for those without."""
    ids = [call.get("id") for call in message.tool_calls]
    twice = next((id_ for index, id_ in enumerate(ids) if id_ is not None and id_ in ids[:index]), None)
    if twice is not None:
        raise field_error(f"two calls of the turn have the id '{twice}'", origin, where, "give each an id of its own")
    return ids


def _check_none_waits(waiting: Sequence[object], origin: Origin, where: str) -> None:
    """Raises UserError for calls without a result in a turn whose other calls have one. All results may be in one
    message that names no call, and nothing follows the last calls of a conversation."""
    if waiting:
        listed = ", ".join(str(call) for call in waiting)
        problem = f"no result of the call {listed}, while other calls of the turn have one"
        raise field_error(
            problem, origin, where, "add a message of role tool with its tool_call_id, or remove the call"
        )


def _check_result(message: Message, waiting: list[object], origin: Origin, where: str) -> bool:
    """Takes the call that a result answers from those that wait for one, and says whether the result names it."""
    id_ = dict(message.extra).get("tool_call_id")
    if not waiting:
        fix = "write one result for each call, or add the call"
        raise field_error("more results than calls", origin, where, fix)
    if id_ is None or all(call is None for call in waiting):
        waiting.pop(0)
        return False
    if id_ not in waiting:
        listed = ", ".join(str(call) for call in waiting)
        problem = f"a result of the call '{id_}', which the turn before does not make"
        raise field_error(problem, origin, f"{where}.tool_call_id", f"calls without a result: {listed}")
    waiting.remove(id_)
    return True
