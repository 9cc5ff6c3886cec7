"""The samples that every data format is converted to: conversations and texts, single, in pairs or with a label.

The cache key of tokenised data contains the `repr` of samples (store.sample_digest): renaming a class or a field here
makes every cached store unusable, and every earlier run impossible to resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
class Message:
    """One message of a conversation.

    `weight` scales its loss: None is the recipe's default for the role, 0 excludes it. `extra` holds further keys that
    a chat template may read, such as name or reasoning_content.
    """

    role: Role
    content: str
    weight: float | None = None
    tool_calls: tuple[JsonObject, ...] = ()
    extra: tuple[tuple[str, object], ...] = ()


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


Sample = Document | Pair | Labelled
