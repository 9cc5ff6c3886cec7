"""Brings calls and results of a record into OpenAI's form and order, and checks that they belong together."""

from __future__ import annotations

from collections.abc import Sequence

from meshtune.data.conversation import JsonObject, Message, Origin
from meshtune.data.dialect import as_dict
from meshtune.data.formats.hermes_text import check_tools_are_given_once, results_of_text, with_text_read
from meshtune.data.formats.record import check_turns, field_error
from meshtune.data.tool_calls import in_order_of_calls, tool_name
from meshtune.errors import nearest


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
