"""Reading the fields of one record, each mistake an error that names file, record and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.data.conversation import Message, Origin
from meshtune.errors import UserError

KINDS = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def bad(what: str, origin: Origin, field: str, fix: str) -> UserError:
    """The error for one field of one record."""
    return UserError(what, where=f"{origin}, field '{field}'", fix=fix)


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    return "null" if value is None else KINDS.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value for an error message: its kind and its beginning."""
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{kind(value)}: {text[:60]}{'…' if len(text) > 60 else ''}"


def text_field(record: Mapping[str, Any], field: str, origin: Origin, *, required: bool = True) -> str:
    """The text under `field`; empty where an optional field is missing or null.

    Raises UserError where a required field is missing or blank, and where the value is not text.
    """
    value = record.get(field)
    if value is None:
        if not required:
            return ""
        if field in record:
            raise bad("the field is null", origin, field, "fill it, or take the record out")
        keys = ", ".join(map(str, record)) or "none"
        raise bad(
            f"the field is missing; the record's fields are: {keys}",
            origin,
            field,
            f"map it: columns: {{{field}: NAME}}",
        )
    return text(value, origin, field, required=required)


def text(value: Any, origin: Origin, field: str, *, required: bool = True) -> str:
    """`value` if it is well-formed text, and not blank where it is required."""
    if not isinstance(value, str):
        raise bad(f"expected text, found {shown(value)}", origin, field, "write it as text, in quotes")
    if required and (not value or value.isspace()):
        raise bad("the text is empty", origin, field, "fill it, or take the record out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        broken = f"\\u{ord(value[error.start]):04x}"
        raise bad(
            f"half of a character ({broken}) at position {error.start}", origin, field, "write whole characters"
        ) from None
    return value


def list_field(record: Mapping[str, Any], field: str, origin: Origin, holds: str) -> Sequence[Any]:
    """The list under `field`; UserError where it is missing, no list, or empty."""
    value = record.get(field)
    if value is None:
        text_field(record, field, origin)  # says that it is missing or null
    if not isinstance(value, list | tuple):
        raise bad(f"expected a list of {holds}, found {shown(value)}", origin, field, f"write a list of {holds}")
    if not value:
        raise bad("the list is empty", origin, field, "fill it, or take the record out")
    return value


def weight_field(turn: Mapping[str, Any], origin: Origin, field: str) -> float | None:
    """The `weight` (OpenAI) or `loss_weight` (LLaMA-Factory) of a turn: a number >= 0; None where there is none."""
    key = "weight" if turn.get("weight") is not None else "loss_weight"
    value = turn.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        what = f"expected a number >= 0, found {shown(value)}"
        raise bad(what, origin, f"{field}.{key}", "0 does not learn the turn, 1 learns it in full")
    return float(value)


def tool_list(value: Any, origin: Origin, field: str) -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's form, from JSON text or a list; a bare function schema is wrapped. Nothing gives ()."""
    if isinstance(value, str):
        value = _json(value, origin, field) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad(
            f"expected a list of tools, found {shown(value)}", origin, field, "write a JSON list of function schemas"
        )
    tools = []
    for index, tool in enumerate(value):
        place = f"{field}[{index}]"
        if not isinstance(tool, dict):
            raise bad(f"expected a function schema, found {shown(tool)}", origin, place, "write an object with a name")
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if not isinstance(function.get("name"), str):
            raise bad("the function has no name", origin, f"{place}.name", "name it")
        tools.append(tool if function is not tool else {"type": "function", "function": tool})
    return tuple(tools)


def tool_call(value: Any, origin: Origin, field: str) -> dict[str, Any]:
    """A call as {"type": "function", "function": {"name", "arguments"}}; an id is kept.

    Arguments are an object, as chat templates of `transformers` want them; OpenAI's JSON text of them is parsed.
    """
    if isinstance(value, str):
        value = _json(value, origin, field)
    if not isinstance(value, dict):
        raise bad(
            f"expected a function call, found {shown(value)}", origin, field, 'write {"name": ..., "arguments": {...}}'
        )
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise bad("the function call has no name", origin, f"{field}.name", 'write {"name": ..., "arguments": {...}}')
    if isinstance(arguments, str):
        arguments = _json(arguments, origin, f"{field}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        what = f"expected an object of arguments, found {shown(arguments)}"
        raise bad(what, origin, f"{field}.arguments", "write them as {name: value}")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call


def _json(value: str, origin: Origin, field: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad(f"not JSON ({error}): {value[:60]!r}", origin, field, "mend the JSON text") from None


def check_turns(
    messages: Sequence[Message],
    origin: Origin,
    field: str,
    said: Sequence[str] | None = None,
    *,
    results_alone: bool = False,
) -> None:
    """The order of a conversation: at most one system turn, first; user and assistant in turn, user first; tool results
    after an assistant's tool calls and before its answer; an assistant turn at the end.

    `said` are the roles as the record spells them. `results_alone` also lets a tool result follow an assistant turn
    whose call is in its text, as sharegpt data has it. Raises UserError naming the turn.
    """
    before = ""
    for index, message in enumerate(messages):
        role = message.role
        if role == "system" and index == 0:
            continue
        allowed = _after(before, messages[index - 1] if before else None, results_alone)
        if role not in allowed:
            word = said[index] if said else role
            after = f"after {said[index - 1] if said else messages[index - 1].role}" if index else "at the start"
            raise bad(
                f"wrong role order: '{word}' {after}, where {' or '.join(allowed)} is expected",
                origin,
                f"{field}[{index}]",
                "roles take turns after at most one system turn: user, assistant, user, assistant; tool results follow "
                "a tool call; mend the record",
            )
        before = role
    if before != "assistant":
        raise bad(
            f"the conversation ends with {said[-1] if said else messages[-1].role}, so nothing answers it",
            origin,
            f"{field}[{len(messages) - 1}]",
            "end it with an assistant turn; mend the record",
        )


def _after(before: str, last: Message | None, results_alone: bool) -> tuple[str, ...]:
    if before == "user":
        return ("assistant",)
    if before == "tool":
        return ("tool", "assistant")
    if before == "assistant" and last is not None:
        if last.tool_calls:
            return ("tool",)
        return ("user", "tool") if results_alone else ("user",)
    return ("user",)
