"""Samples of the data: conversations with their tool calls, and texts, one by one, in pairs or with a label. Their repr
is part of the cache key of tokenised data (store.sample_digest).

The cache key of tokenised data contains the `repr` of samples (store.sample_digest): renaming a class or a field here
makes every cached store unusable, and every earlier run impossible to resume.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a record comes from: `source` is a file or data set as the user named it, `record` an index from 0."""

    source: str
    record: int

    def __str__(self) -> str:
        return f"{self.source}, record {self.record}"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A file with a picture that was checked: its path, the BLAKE2b digest of its bytes, and its size in pixels as it
    is shown (turned as its EXIF data say)."""

    path: str
    digest: str
    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height


@dataclasses.dataclass(frozen=True)
class PlacedPicture:
    """A picture before the character `offset` of a message's text.

    Until it is opened, `picture` is its address as the record has it, or its bytes; None: the next one of the record's
    list of pictures.
    """

    offset: int
    picture: Picture | str | bytes | None


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a conversation.

    `weight` scales its loss: None is the recipe's default for the role, 0 excludes it. `extra` holds further keys that
    a chat template may read, such as name or reasoning_content. `pictures` are in the order of their places.
    """

    role: Role
    content: str
    weight: float | None = None
    tool_calls: tuple[JsonObject, ...] = ()
    extra: tuple[tuple[str, object], ...] = ()
    pictures: tuple[PlacedPicture, ...] = ()

    def __repr__(self) -> str:
        # Without pictures it is what it was before they existed: stores of earlier versions remain usable.
        pictures = f", pictures={self.pictures!r}" if self.pictures else ""
        return (
            f"Message(role={self.role!r}, content={self.content!r}, weight={self.weight!r}, "
            f"tool_calls={self.tool_calls!r}, extra={self.extra!r}{pictures})"
        )

    @property
    def parts(self) -> list[dict[str, object]]:
        """The text and the places of the pictures as content parts, which chat templates read."""
        parts, start = list[dict[str, object]](), 0
        for placed in self.pictures:
            if self.content[start : placed.offset]:
                parts.append({"type": "text", "text": self.content[start : placed.offset]})
            parts.append({"type": "image"})
            start = placed.offset
        if self.content[start:]:
            parts.append({"type": "text", "text": self.content[start:]})
        return parts


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat, to be rendered with a chat template. `tools` are JSON schemas in OpenAI's form, `variables` those that
    the record sets for the template (chat_template_kwargs)."""

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[JsonObject, ...] = ()
    variables: JsonObject = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        # Without variables it is what it was before they existed: stores of earlier versions remain usable.
        variables = f", variables={self.variables!r}" if self.variables else ""
        return f"Conversation(messages={self.messages!r}, origin={self.origin!r}, tools={self.tools!r}{variables})"

    @property
    def pictures(self) -> list[Picture]:
        """The pictures of all messages in order, once they were opened."""
        placed = (placed.picture for message in self.messages for placed in message.pictures)
        return [picture for picture in placed if isinstance(picture, Picture)]


@dataclasses.dataclass(frozen=True)
class Text:
    """A text without messages. `prompt` is excluded from the loss unless the recipe includes prompts; plain text has
    an empty one. `system_prompt` is one that it should have had, and for which it has no place."""

    text: str
    origin: Origin
    prompt: str = ""
    system_prompt: str | None = dataclasses.field(default=None, repr=False)


Document = Conversation | Text


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt; `chosen` is the better one. Only the last turn of each is compared.

    `margin` is how much better it is, where the data say so.
    """

    chosen: Document
    rejected: Document
    origin: Origin
    margin: float = 0.0


@dataclasses.dataclass(frozen=True)
class Labelled:
    """An answer, which is the last turn of `document`, and whether it is a good one."""

    document: Document
    good: bool
    origin: Origin


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt to answer. `document` ends where the answer begins: a conversation, or a text that is continued.

    `columns` are the record's other fields as JSON text, for rewards; `answer` among them is the answer that the
    record has.
    """

    document: Document
    columns: str
    origin: Origin


Sample = Document | Pair | Labelled | Prompt


def map_documents(sample: Sample, change: Callable[[Document], Document]) -> Sample:
    """The sample with `change` applied to each of its documents."""
    match sample:
        case Pair():
            return dataclasses.replace(sample, chosen=change(sample.chosen), rejected=change(sample.rejected))
        case Labelled() | Prompt():
            return dataclasses.replace(sample, document=change(sample.document))
        case _:
            return change(sample)


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


def add_system(sample: Sample, system: str) -> Sample:
    """The sample with `system` before every conversation that has no system turn."""
    return map_documents(sample, functools.partial(_add_to, system=system))


def _add_to(document: Document, system: str) -> Document:
    if not isinstance(document, Conversation):
        return dataclasses.replace(document, system_prompt=system)
    if any(message.role == "system" for message in document.messages):
        return document
    return dataclasses.replace(document, messages=(Message("system", system), *document.messages))
