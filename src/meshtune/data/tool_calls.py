"""Tool calls in OpenAI's form: their names, the spellings of their arguments in templates, and their results' order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from meshtune.data.conversation import JsonObject


def tool_name(call: JsonObject) -> str:
    """The name of a tool or of a call, in OpenAI's form or bare."""
    function = call.get("function")
    return str((function if isinstance(function, Mapping) else call).get("name", ""))


def argument_texts(value: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(what it is, the forms in which a template may write it) of every key and value in arguments."""
    match value:
        case Mapping():
            for key, inner in value.items():
                yield str(key), _spellings(str(key))
                yield from argument_texts(inner)
        case list() | tuple():
            for inner in value:
                yield from argument_texts(inner)
        case str():
            yield value, _spellings(value)
        case bool() | None:
            yield json.dumps(value), (json.dumps(value), str(value))
        case _:
            yield json.dumps(value), (json.dumps(value), str(value), repr(value))


def _spellings(text: str) -> tuple[str, ...]:
    quoted = json.dumps(text, ensure_ascii=False)[1:-1]
    twice = json.dumps(quoted, ensure_ascii=False)[1:-1]
    single = repr(f'"{text}')[2:-1]  # a double quote at the beginning makes Python write it in single quotes
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")  # LFM2's
    return text, text.strip(), quoted, json.dumps(text)[1:-1], repr(text)[1:-1], single, twice, escaped


def in_order_of_calls(messages: Sequence[Mapping[str, object]]) -> list[int]:
    """The indices of `messages` in an order in which the results after each turn of calls follow the calls' order: most
    templates write results without ids. Those that neither tool_call_id nor name tells apart stay where they are."""
    order: list[int] = []
    while (index := len(order)) < len(messages):
        order.append(index)
        calls = messages[index].get("tool_calls")
        if isinstance(calls, list | tuple) and calls:
            end = next((n for n in range(index + 1, len(messages)) if messages[n]["role"] != "tool"), len(messages))
            order += [index + 1 + place for place in _order(calls, messages[index + 1 : end])]
    return order


def _order(calls: Sequence[JsonObject], results: Sequence[Mapping[str, object]]) -> list[int]:
    """The indices of `results` in the order of their calls."""
    places = list(range(len(results)))
    ids, names = [call.get("id") for call in calls], [tool_name(call) for call in calls]
    for keys, field in ((ids, "tool_call_id"), (names, "name")):
        numbers = {key: number for number, key in enumerate(keys) if key is not None}
        answered = [numbers.get(result.get(field)) for result in results]
        if len(numbers) == len(calls) and all(number is not None for number in answered):
            return sorted(places, key=lambda place: answered[place] or 0)
    return places
