"""Places of pictures in the turns of a record: `<image>` marks in their texts, and content parts.

A record's list of pictures is LLaMA-Factory's `images` (data/README.md), TRL's `images` or `image`, or a column of the
type Image. Its marks <image>, and parts {"type": "image"} without an address, take the pictures in order. Without any
mark or part the pictures come first in the first turn of the user, as in TRL (trl.data_utils:
prepare_multimodal_messages). Parts of OpenAI's API carry their own picture: an address below the folder of pictures,
or a data URI.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from meshtune.data.conversation import Conversation, Document, Message, Origin, PlacedPicture, Sample, map_documents
from meshtune.data.formats.record import FieldNames, Record, describe, field_error, is_blank, picture_field
from meshtune.errors import UserError, amount

MARK = "<image>"
_ADDRESSES = ("image_url", "image", "url", "path", "value", "bytes")


def part_picture(part: Mapping[str, object], origin: Origin, field: str) -> str | bytes | None:
    """The address or the bytes of a picture part; None where it takes the next picture of the record's list."""
    key = next((key for key in _ADDRESSES if part.get(key) is not None), None)
    return None if key is None else picture_reference(part[key], origin, f"{field}.{key}")


def picture_reference(value: object, origin: Origin, field: str) -> str | bytes:
    """The address or the bytes of a picture: text, bytes, {"url": ...}, or {"bytes": ..., "path": ...} as data sets
    have it. Raises UserError for anything else."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, str | bytes) and value:
        return value
    problem = f"expected the path of a picture, found {describe(value)}"
    raise field_error(problem, origin, field, "write a path, a data URI, or bytes")


def place_pictures(sample: Sample, record: Record, fields: FieldNames, origin: Origin) -> Sample:
    """The sample with the record's pictures in the places of their marks.

    Raises UserError where marks and pictures do not count alike, and for a picture in an answer.
    """
    field = picture_field(record, fields)
    value = None if field is None else record[field]
    if field is None or is_blank(value):
        return map_documents(sample, lambda document: _place(document, [], "images", origin))
    items = value if isinstance(value, list | tuple) else [value]
    listed = [picture_reference(item, origin, f"{field}[{index}]") for index, item in enumerate(items)]
    return map_documents(sample, lambda document: _place(document, listed, field, origin))


def _place(document: Document, listed: list[str | bytes], field: str, origin: Origin) -> Document:
    if not isinstance(document, Conversation):
        if listed:
            fix = "give its turns, with format: messages or sharegpt; or columns: {images: null} trains without them"
            raise field_error("texts without a chat template have no place for pictures", origin, field, fix)
        return document
    if not listed and not any(message.pictures for message in document.messages):
        return document
    places = sum(map(_places, document.messages))
    attached = sum(placed.picture is not None for message in document.messages for placed in message.pictures)
    if places == attached == 0:
        first = next(index for index, message in enumerate(document.messages) if message.role == "user")
        placed = tuple(PlacedPicture(0, picture) for picture in listed)
        turns = list(document.messages)
        turns[first] = dataclasses.replace(turns[first], pictures=placed)
        return dataclasses.replace(document, messages=tuple(turns))
    if places - attached != len(listed):
        marks, pictures = amount(places - attached, f"mark {MARK}", f"marks {MARK}"), amount(len(listed), "picture")
        problem = f"the turns have {marks}, and the record has {pictures}"
        raise field_error(problem, origin, field, f"write {MARK} once for each picture, where it goes")
    remaining = iter(listed)
    messages = tuple(
        _with_pictures(message, remaining) if _places(message) else message for message in document.messages
    )
    for index, message in enumerate(messages):
        if message.pictures and message.role == "assistant":
            problem = f"a picture in the answer of turn {index}: models answer in words"
            raise field_error(problem, origin, field, "move it into a turn of the user, or remove the record")
    return dataclasses.replace(document, messages=messages)


def _places(message: Message) -> int:
    """The places of pictures in a message: its parts, or where it has none the marks in its text."""
    return len(message.pictures) or message.content.count(MARK)


def _with_pictures(message: Message, listed: Iterator[str | bytes]) -> Message:
    """The message with pictures of the list in its open places, in order."""
    if message.pictures:
        pictures = (
            placed if placed.picture is not None else PlacedPicture(placed.offset, next(listed))
            for placed in message.pictures
        )
        return dataclasses.replace(message, pictures=tuple(pictures))
    marks = re.finditer(re.escape(MARK), message.content)
    placed = tuple(PlacedPicture(mark.start() - n * len(MARK), next(listed)) for n, mark in enumerate(marks))
    return dataclasses.replace(message, content=message.content.replace(MARK, ""), pictures=placed)


def check_no_mark(document: Document) -> None:
    """Raises UserError for a mark in a turn that has no picture, where pictures are read."""
    for index, message in enumerate(document.messages if isinstance(document, Conversation) else ()):
        if message.role != "assistant" and MARK in message.content:
            raise UserError(
                f"turn {index} has a mark {MARK}, and the record no picture for it",
                where=str(document.origin),
                fix="list its picture under images, or write the text without the mark",
            )
