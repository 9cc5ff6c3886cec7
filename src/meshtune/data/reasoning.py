"""Reasoning before an answer or a call: in a separate field, or as <think> text at the beginning of the content.

Where the prompt of generation holds the opening tag, as DeepSeek R1's and Qwen3's thinking models have it, completions
have only the closing tag, on a line of its own or at the end of the last one.
"""

from __future__ import annotations

import dataclasses
import re

from meshtune.config.data_options import Reasoning
from meshtune.data.conversation import Conversation, Message
from meshtune.data.dialect import REASONING_KEYS, Dialect
from meshtune.errors import UserError

_BEFORE_A_MENTION = frozenset(" \t\"'`(\u201c\u2018\u00ab")
_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def split_reasoning(content: str) -> tuple[str, str]:
    """The text of a <think> block that begins `content`, without the white space around it, and what follows it. The
    opening tag may be missing, but not where an answer merely mentions the closing one."""
    block = _BLOCK.match(content)
    if block:
        return block.group(1).strip(), content[block.end() :]
    before, tag, after = content.partition("</think>")
    if not tag or "<think>" in before or before.count("```") % 2:
        return "", content
    begins_line = before.rstrip(" ").endswith("\n")
    ends_line = not after.strip(" ") or after.lstrip(" ").startswith("\n")
    if not begins_line and (not ends_line or before[-1:] in _BEFORE_A_MENTION):
        return "", content
    return before.strip(), after.lstrip()


def reasoning_of(message: Message) -> str:
    """The reasoning of an assistant's turn in its own field, "" without one."""
    if message.role != "assistant":
        return ""
    return next((value for key, value in message.extra if key in REASONING_KEYS and isinstance(value, str)), "")


def has_reasoning(message: Message) -> bool:
    """Whether an assistant's turn has reasoning, in a field or as text that ends with </think>."""
    return message.role == "assistant" and ("</think>" in message.content or bool(reasoning_of(message)))


def with_reasoning(conversation: Conversation, choice: Reasoning, dialect: Dialect | None) -> Conversation:
    """The conversation with its reasoning where `choice` wants it; `dialect` is the template's, for choice "template".

    Raises UserError for a turn that is empty without its reasoning.
    """
    messages = []
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            messages.append(message)
            continue
        match choice:
            case "drop":
                messages.append(_without(message, index, conversation))
            case "inline":
                messages.append(_inline(message))
            case "template":
                messages.append(_in_field(message, dialect))
    return dataclasses.replace(conversation, messages=tuple(messages))


def _without(message: Message, index: int, conversation: Conversation) -> Message:
    _, answer = split_reasoning(message.content)
    if not answer.strip() and not message.tool_calls:
        raise UserError(
            f"nothing is left of the assistant's turn {index} without its reasoning",
            where=str(conversation.origin),
            fix="set data.reasoning: template, or data.on_bad=skip to leave such records out",
        )
    return dataclasses.replace(message, content=answer, extra=_other_fields(message))


def _inline(message: Message) -> Message:
    reasoning, answer = reasoning_of(message).strip(), message.content
    if not reasoning and not _BLOCK.match(answer):
        reasoning, answer = split_reasoning(answer)  # of which the opening tag is missing
    if not reasoning:
        return message
    content = f"<think>\n{reasoning}\n</think>\n\n{answer}"
    return dataclasses.replace(message, content=content, extra=_other_fields(message))


def _in_field(message: Message, dialect: Dialect | None) -> Message:
    """The message with <think> text in the field that the template reads, if it writes reasoning in its own form, or
    if the opening tag is missing."""
    if dialect is None or dialect.reasoning_key is None or reasoning_of(message):
        return message
    if dialect.think_tags and _BLOCK.match(message.content):
        return message
    reasoning, answer = split_reasoning(message.content)
    if not reasoning:
        return message
    extra = (*_other_fields(message), (dialect.reasoning_key, reasoning))
    return dataclasses.replace(message, content=answer, extra=extra)


def _other_fields(message: Message) -> tuple[tuple[str, object], ...]:
    return tuple((key, value) for key, value in message.extra if key not in REASONING_KEYS)
