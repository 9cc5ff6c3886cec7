"""Tools that a model may call, and the calls that it makes."""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
from collections.abc import Mapping
from typing import Any

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments; `definition` is the tool as
    chat templates read it."""

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Arguments that every call has."""
        return frozenset(self.parameters.get("required") or ())


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Tools = Mapping[str, Tool]


def call_from_json(value: Any) -> ToolCall:
    """The call of an object with a name and arguments (or parameters). Raises ValueError."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call has a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return call_of(value["name"], arguments)


def call_of(name: str, arguments: Any) -> ToolCall:
    """A call of a name with an object of arguments. Raises ValueError where it is none."""
    if not name or not isinstance(arguments, Mapping):
        raise ValueError("a call has a name and an object of arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def new_id(length: int | None) -> str:
    """An id for a call; `length` letters and digits where the family has a length, else as OpenAI's."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(length))


def typed_argument(text: str, schema: Any) -> Any:
    """An argument that was written as bare text: a string where its schema has no other type, else JSON if it is."""
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if types == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
