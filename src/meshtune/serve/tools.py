"""Tools in a request: their definitions, which of them must be called, and calls of earlier turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from meshtune.serve.body import parse_json
from meshtune.serve.errors import ApiError
from meshtune.serve.responses.call import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class FunctionDefinition(BaseModel):
    """A function that a model may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """A tool; functions are the only kind."""

    type: str
    function: FunctionDefinition


class CalledFunction(BaseModel):
    """The function that an earlier turn called; the arguments are JSON as text."""

    name: str
    arguments: str | dict[str, Any]


class EarlierCall(BaseModel):
    """A call of an earlier turn of the assistant."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction

    def rendered(self, where: str) -> dict[str, Any]:
        """The call as chat templates read it, its arguments an object. Raises ApiError for arguments that are none."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            arguments = _object(arguments, f"{where}.function.arguments")
        if not self.function.name:
            raise ApiError(400, "a call needs the name of a function", param=f"{where}.function.name")
        call = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


def named_tools(definitions: list[ToolDefinition]) -> dict[str, Tool]:
    """Tools by name. Raises ApiError for one without a proper name, of another kind, or whose name is given twice."""
    tools: dict[str, Tool] = {}
    for n, definition in enumerate(definitions):
        where = f"tools[{n}]"
        if definition.type != "function":
            raise ApiError(400, f"tools of type '{definition.type[:100]}' are not known here", param=f"{where}.type")
        function = definition.function
        if not _NAME.fullmatch(function.name):
            message = f"'{function.name[:128]}' is no name for a tool: give 1 to 128 letters, digits, _, . or -"
            raise ApiError(400, message, param=f"{where}.function.name")
        if function.name in tools:
            raise ApiError(400, f"two tools are called '{function.name}'", param=f"{where}.function.name")
        parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        if parameters.get("type", "object") != "object":
            raise ApiError(400, "arguments of a tool are an object", param=f"{where}.function.parameters.type")
        _check_schema(parameters, f"{where}.function.parameters")
        shown = {"name": function.name, "description": function.description or "", "parameters": parameters}
        tools[function.name] = Tool(function.name, parameters, {"type": "function", "function": shown})
    return tools


def required_tools(choice: Any, tools: Mapping[str, Tool]) -> list[Tool]:
    """The tools that the model must choose from; none where the model decides. Raises ApiError for an unknown
    choice."""
    match choice:
        case None | "auto" | "none":
            return []
        case "required" if tools:
            return list(tools.values())
        case {"type": "function", "function": {"name": str(name)}} if name in tools:
            return [tools[name]]
        case {"type": "function", "function": {"name": str(name)}} if tools:
            raise ApiError(
                400, f"no tool is called '{str(name)[:128]}'; there are: {', '.join(tools)}", param="tool_choice"
            )
        case "required" | {"type": "function"} if not tools:
            raise ApiError(400, "a tool is to be called, and there is none", param="tool_choice")
        case _:
            message = "tool_choice is auto, none, required or {type: function, function: {name: ...}}"
            raise ApiError(400, message, param="tool_choice")


def _check_schema(schema: Any, where: str) -> None:
    """Raises ApiError where the parts of a schema that formats of calls read have another type."""
    if not isinstance(schema, Mapping):
        return
    for name, kind in (("properties", Mapping), ("required", list), ("enum", list)):
        if not isinstance(schema.get(name, [] if kind is list else {}), kind):
            form = "an object" if kind is Mapping else "a list"
            raise ApiError(400, f"{name} of a schema is {form}", param=f"{where}.{name}")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise ApiError(400, "required of a schema is a list of names", param=f"{where}.required")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{where}.properties.{name[:100]}")
    _check_schema(schema.get("items"), f"{where}.items")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text or "{}")
    except ValueError as problem:
        raise ApiError(400, f"the arguments of a call are not JSON: {problem}", param=where) from problem
    if not isinstance(value, dict):
        raise ApiError(400, "the arguments of a call are a JSON object", param=where)
    return value
