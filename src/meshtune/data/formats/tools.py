"""Reads and checks the tools of a record, its calls and their results. Every error names the file, record and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshtune.data.conversation import JsonObject, Message, Origin
from meshtune.data.dialect import tool_name
from meshtune.data.formats.record import describe, field_error, parse_json
from meshtune.data.formats.record_format import Record
from meshtune.errors import nearest


def parse_tools(record: Record, field: str | None, origin: Origin) -> tuple[Mapping[str, object], ...]:
    """The tools under `field` in OpenAI's form, from JSON text or a list; bare function schemas are wrapped.

    () where the records have no such field, or it is null or blank. Raises UserError where it is malformed.
    """
    value = record.get(field) if field else None
    if isinstance(value, str):
        value = parse_json(value, origin, field or "") if value.strip() else None
    if value is None or not field:
        return ()
    if not isinstance(value, list):
        problem = f"expected a list of tools, found {describe(value)}"
        raise field_error(problem, origin, field, "write a JSON list of function schemas")
    return tuple(_parse_tool(tool, origin, f"{field}[{index}]") for index, tool in enumerate(value))


def _parse_tool(tool: object, origin: Origin, field: str) -> Mapping[str, object]:
    if not isinstance(tool, dict):
        problem = f"expected a function schema, found {describe(tool)}"
        raise field_error(problem, origin, field, "write an object with a name")
    wrapped = isinstance(tool.get("function"), dict)
    function = tool["function"] if wrapped else tool
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise field_error("the function has no name", origin, f"{field}.name", "name it")
    if not isinstance(function.get("parameters", {}), dict | None):
        problem = f"expected a JSON schema, found {describe(function['parameters'])}"
        raise field_error(problem, origin, f"{field}.parameters", 'write {"type": "object", "properties": {...}}')
    return tool if wrapped else {"type": "function", "function": tool}


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
    function = value["function"] if isinstance(value.get("function"), dict) else value
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
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call


def check_tool_use(messages: Sequence[Message], tools: Sequence[JsonObject], origin: Origin, field: str) -> None:
    """Raises UserError for a call of a tool that the record does not declare, and for a result that is of no call.

    Records without tools may describe them in the system prompt; calls may be written in an assistant's text.
    """
    declared = [tool_name(tool) for tool in tools]
    waiting: list[object] = []
    called = False
    for index, message in enumerate(messages):
        where = f"{field}[{index}]"
        if message.role == "assistant":
            for name in map(tool_name, message.tool_calls):
                if declared and name not in declared:
                    hint = nearest(name, declared)
                    fix = f"{hint}declare it in tools, which has: {', '.join(declared)}"
                    raise field_error(f"a call of '{name}', which the record does not declare", origin, where, fix)
            waiting, called = [call.get("id") for call in message.tool_calls], bool(message.tool_calls)
        elif message.role == "tool" and called:
            _check_result(message, waiting, origin, where)


def _check_result(message: Message, waiting: list[object], origin: Origin, where: str) -> None:
    """Takes the call that a result answers from those that wait for one."""
    id_ = dict(message.extra).get("tool_call_id")
    if not waiting:
        fix = "write one result for each call, or add the call"
        raise field_error("more results than calls", origin, where, fix)
    if id_ is None or all(call is None for call in waiting):
        waiting.pop(0)
    elif id_ in waiting:
        waiting.remove(id_)
    else:
        listed = ", ".join(str(call) for call in waiting)
        problem = f"a result of the call '{id_}', which the turn before does not make"
        raise field_error(problem, origin, f"{where}.tool_call_id", f"calls without a result: {listed}")
