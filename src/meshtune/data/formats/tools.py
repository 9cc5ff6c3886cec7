"""Reads and checks the tools of a record and its calls. Every error names the file, record and field."""

from __future__ import annotations

import json
from collections.abc import Mapping

from meshtune.data.conversation import Origin
from meshtune.data.formats.meanings import is_blank
from meshtune.data.formats.parameters import as_schema, is_schema
from meshtune.data.formats.record import describe, field_error, parse_json
from meshtune.data.formats.record_format import Record
from meshtune.data.tool_calls import tool_name


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
