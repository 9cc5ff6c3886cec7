"""What every data format becomes: a document to learn from, and where it came from."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a record came from: `source` is a file or data set as the user named it, `record` counts from 0."""

    source: str
    record: int

    def __str__(self) -> str:
        return f"{self.source}, record {self.record}"


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn. `weight` scales its loss: None is the recipe's default for the role, 0 never learns it."""

    role: Role
    content: str
    weight: float | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()  # further keys a chat template may read, e.g. name, reasoning_content


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat to render with a template. `tools` are JSON schemas in OpenAI's form."""

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Text:
    """Text without turns. `prompt` is not learned unless the recipe says so; it is empty for plain text."""

    text: str
    origin: Origin
    prompt: str = ""


Document = Conversation | Text


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt, of which `chosen` is the better; only the last turn of each is looked at.

    `margin` says how much better, where the data do.
    """

    chosen: Document
    rejected: Document
    origin: Origin
    margin: float = 0.0


@dataclasses.dataclass(frozen=True)
class Labelled:
    """An answer, the last turn of `document`, and whether it is a good one."""

    document: Document
    good: bool
    origin: Origin


Sample = Document | Pair | Labelled
