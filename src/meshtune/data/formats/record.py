"""Reads and checks the fields of one record. Every error names the file, the record and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from meshtune.data.conversation import Message, Origin
from meshtune.data.formats.record_format import Record
from meshtune.errors import UserError, nearest

JSON_TYPES = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def field_error(problem: str, origin: Origin, field: str, fix: str) -> UserError:
    """The error for one field of one record."""
    return UserError(problem, where=f"{origin}, field '{field}'", fix=fix)


def json_type(value: object) -> str:
    """The name of a JSON value's type, for people."""
    return "null" if value is None else JSON_TYPES.get(type(value), type(value).__name__)


def describe(value: object) -> str:
    """A value for an error message: its type and its first 60 characters."""
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{json_type(value)}: {text[:60]}{'…' if len(text) > 60 else ''}"


def text_field(record: Record, field: str, origin: Origin, *, required: bool = True) -> str:
    """The text under `field`, or "" where an optional field is missing or null.

    Raises UserError where a required field is missing or blank, and where the value is not text.
    """
    value = record.get(field)
    if value is None:
        if not required:
            return ""
        raise missing_field_error(record, field, origin)
    return check_text(value, origin, field, required=required)


def missing_field_error(record: Record, field: str, origin: Origin) -> UserError:
    """The error for a required field that is null or missing."""
    if field in record:
        return field_error("the field is null", origin, field, "fill it, or remove the record")
    names = ", ".join(map(str, record)) or "none"
    problem = f"the field is missing; the record's fields are: {names}"
    return field_error(problem, origin, field, f"{nearest(field, map(str, record))}map it: columns: {{{field}: NAME}}")


def check_text(value: object, origin: Origin, field: str, *, required: bool = True) -> str:
    """`value`, if it is well-formed text that is not blank where it is required. Raises UserError otherwise."""
    if not isinstance(value, str):
        raise field_error(f"expected text, found {describe(value)}", origin, field, "write it as text, in quotes")
    if required and (not value or value.isspace()):
        raise field_error("the text is empty", origin, field, "fill it, or remove the record")
    if not value.isascii():
        _check_characters(value, origin, field)
    return value


def _check_characters(value: str, origin: Origin, field: str) -> None:
    """Raises UserError for text with half of a character (a surrogate)."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"half of a character (\\u{ord(value[error.start]):04x}) at position {error.start}"
        raise field_error(problem, origin, field, "write whole characters") from None


def list_field(record: Record, field: str, origin: Origin, holds: str) -> Sequence[object]:
    """The list under `field`, whose items are called `holds`. Raises UserError where it is missing, no list, or
    empty."""
    value = record.get(field)
    if value is None:
        raise missing_field_error(record, field, origin)
    if not isinstance(value, list | tuple) or not value:
        raise _list_error(value, origin, field, holds)
    return value


def _list_error(value: object, origin: Origin, field: str, holds: str) -> UserError:
    if isinstance(value, list | tuple):
        return field_error("the list is empty", origin, field, "fill it, or remove the record")
    fix = f"write a list of {holds}"
    return field_error(f"expected a list of {holds}, found {describe(value)}", origin, field, fix)


# Names of a turn's weight in the loss: OpenAI's and LLaMA-Factory's are numbers, the others switches: ms-swift's loss,
# axolotl's train and training (message_field_training), tinker_cookbook's trainable.
WEIGHTS, SWITCHES = ("weight", "loss_weight", "loss_scale"), ("loss", "train", "training", "trainable")


def weight_field(turn: Mapping[str, object], origin: Origin, field: str) -> float | None:
    """The weight of a turn in the loss, a number >= 0 or a switch; None if it has neither. Raises UserError where two
    fields of the turn contradict each other."""
    weights = {
        key: _weight(turn[key], key, origin, field) for key in (*WEIGHTS, *SWITCHES) if turn.get(key) is not None
    }
    if len(set(weights.values())) > 1:
        raise _contradiction_error(turn, list(weights), origin, field)
    return next(iter(weights.values()), None)


def _contradiction_error(turn: Mapping[str, object], keys: list[str], origin: Origin, field: str) -> UserError:
    listed = " and ".join(f"{key} {turn[key]!r}" for key in keys)
    fix = "leave one of them"
    return field_error(f"the turn's {listed} contradict each other", origin, f"{field}.{keys[-1]}", fix)


def _weight(value: object, key: str, origin: Origin, field: str) -> float:
    if key in SWITCHES:
        if value not in (0, 1):
            problem = f"expected true or false, found {describe(value)}"
            raise field_error(
                problem, origin, f"{field}.{key}", "false excludes the turn from the loss; or write a weight"
            )
        return float(value)  # pyright: ignore[reportArgumentType] - 0 or 1
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        problem = f"expected a number >= 0, found {describe(value)}"
        raise field_error(problem, origin, f"{field}.{key}", "0 excludes the turn from the loss, 1 counts it in full")
    return float(value)


def parse_json(value: str, origin: Origin, field: str) -> object:
    """The value of JSON text. Raises UserError where it is not JSON."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise field_error(f"not JSON ({error}): {value[:60]!r}", origin, field, "correct the JSON text") from None


def check_turns(
    messages: Sequence[Message],
    origin: Origin,
    field: str,
    role_names: Sequence[str] | None = None,
    *,
    calls_in_text: bool = False,
) -> None:
    """Checks the order of roles in a conversation.

    It has at most one system turn, at the start; then user and assistant alternate, beginning with user; tool results
    follow an assistant's tool calls, before its answer; the last turn is the assistant's.

    `role_names` are the roles as the record spells them. With `calls_in_text` a tool result may follow any assistant
    turn, since its call may be in the text, as in sharegpt data. Raises UserError naming the turn.
    """
    names = role_names or [message.role for message in messages]
    previous: Message | None = None
    for index, message in enumerate(messages):
        if message.role == "system" and index == 0:
            continue
        expected = _expected_roles(previous, calls_in_text)
        if message.role not in expected:
            raise _wrong_order_error(names, index, expected, origin, field)
        previous = message
    if previous is None or previous.role != "assistant":
        raise _no_answer_error(names, origin, field)


def _no_answer_error(names: Sequence[str], origin: Origin, field: str) -> UserError:
    problem = f"the conversation ends with {names[-1]}, so there is no answer to it"
    fix = "end it with an assistant turn; correct the record"
    return field_error(problem, origin, f"{field}[{len(names) - 1}]", fix)


def _wrong_order_error(
    names: Sequence[str], index: int, expected: Sequence[str], origin: Origin, field: str
) -> UserError:
    position = f"after {names[index - 1]}" if index else "at the start"
    problem = f"wrong role order: '{names[index]}' {position}, where {' or '.join(expected)} is expected"
    fix = "after at most one system turn, user and assistant alternate; tool results follow a tool call; correct the "
    return field_error(problem, origin, f"{field}[{index}]", fix + "record")


# The roles that may follow each.
_FOLLOWING: dict[str, tuple[str, ...]] = {"user": ("assistant",), "tool": ("tool", "assistant")}


def _expected_roles(previous: Message | None, calls_in_text: bool) -> tuple[str, ...]:
    """The roles that may follow `previous`, None being the start of the conversation."""
    if previous is None or previous.role in _FOLLOWING:
        return ("user",) if previous is None else _FOLLOWING[previous.role]
    return ("tool",) if previous.tool_calls else ("user", "tool") if calls_in_text else ("user",)
