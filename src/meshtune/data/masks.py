"""Which characters of a rendered conversation are learned: found by rendering, never by marker strings.

A turn's words are what generation must emit: from the end of the generation prompt (the rendering of everything before
the turn with `add_generation_prompt`) through the end-of-turn token. Where a template renders the past differently once
there is a future (Qwen3 drops old reasoning, Mistral drops the system prompt), the turn is found by rendering the
conversation again with other words in its place and comparing, and counted in `prompts_differ`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.data.chat import ChatTemplate, as_dicts, template_error
from meshtune.data.conversation import Conversation
from meshtune.errors import UserError


@dataclasses.dataclass(frozen=True)
class Learn:
    """What is learned from a conversation."""

    train_on_prompt: bool = False
    last_turn_only: bool = False

    def __post_init__(self):
        if self.train_on_prompt and self.last_turn_only:
            raise UserError(
                "train_on_prompt and last_turn_only contradict each other", where="data", fix="set only one of them"
            )


@dataclasses.dataclass(frozen=True)
class Marked:
    """Text and what is learned of it: disjoint ordered `spans` of (start, end, weight), `rest` elsewhere.

    `prompts_differ` counts assistant turns whose past is not rendered as generation would render it, `unended` those
    after which the template writes no end of turn; `tools_unseen` tells that tools are offered and not all are written.
    """

    text: str
    spans: tuple[tuple[int, int, float], ...]
    rest: float = 0.0
    prompts_differ: int = 0
    unended: int = 0
    tools_unseen: bool = False


@dataclasses.dataclass(frozen=True)
class _Turn:
    start: int
    end: int
    differs: bool
    ended: bool


def mark(chat: ChatTemplate, conversation: Conversation, learn: Learn = Learn()) -> Marked:
    """Render a conversation and find what is learned. Raises UserError with the record and the template's own words."""
    messages = as_dicts(conversation)
    where = str(conversation.origin)
    try:
        text = chat.render(messages, conversation.tools)
    except chat.failures as problem:
        raise template_error(problem, where=where) from problem
    assistants = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
    wanted = assistants[-1:] if learn.last_turn_only else assistants
    spans, floor, differ, unended = [], 0, 0, 0
    for index, message in enumerate(conversation.messages):
        if index in wanted:
            turn = _turn(chat, text, messages, conversation, index, floor)
            if lost := [name for name in map(_name, message.tool_calls) if name not in text[turn.start : turn.end]]:
                # Taught as it is rendered, the model would learn to say nothing where it should call.
                raise UserError(
                    f"the chat template does not write the assistant's tool calls: {', '.join(lost)}",
                    where=where,
                    fix="set model.chat_template to a template that knows tools, or data.on_bad=skip to leave them out",
                )
            spans.append((turn.start, turn.end, 1.0 if message.weight is None else message.weight))
            floor = turn.end
            differ += turn.differs
            unended += not turn.ended
        elif message.weight is not None and message.role != "assistant" and not learn.last_turn_only:
            start, end = _changed(chat, text, messages, conversation, index, {**messages[index], "content": None})
            spans.append((max(start, floor), max(end, floor), message.weight))
            floor = max(end, floor)
    unseen = any(_name(tool) not in text for tool in conversation.tools)
    return Marked(text, tuple(spans), float(learn.train_on_prompt), differ, unended, unseen)


def _name(tool: Mapping[str, Any]) -> str:
    """The name of a tool or of a call, in OpenAI's form or bare."""
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def _turn(
    chat: ChatTemplate, text: str, messages: list[dict[str, Any]], conversation: Conversation, index: int, floor: int
) -> _Turn:
    """Where the assistant turn `index` lies in `text`, at or after `floor`."""
    end = chat.end_of_turn
    prompt = _prompt(chat, messages, conversation, index)
    same = prompt is not None and len(prompt) >= floor and text.startswith(prompt)
    if same and prompt is not None:
        start = len(prompt)
        if index == len(messages) - 1 and text.endswith(end.head + end.tail) and len(text) - len(end.tail) >= start:
            return _Turn(start, len(text) - len(end.tail), False, bool(end.head))
        content = messages[index]["content"]
        if content and end.head and "tool_calls" not in messages[index]:
            for words in (content, content.strip()):
                # Nothing but the whole of the words followed by the end of turn will do, so this is a proof.
                if text.startswith(words + end.head, start):
                    return _Turn(start, start + len(words) + len(end.head), False, True)
    header = _header(chat, messages, conversation, index)
    first, last = _differently(chat, text, messages, conversation, index, header)
    if same and prompt is not None:
        start = len(prompt)
    else:
        # The words begin where the header ends, which is before the first character that depends on them if the
        # template writes something of its own there, such as an empty block of reasoning.
        at = text.rfind(header, floor, first) if header else -1
        start = at + len(header) if at >= 0 else first
    start = max(start, floor)
    last = max(last, start)
    ended = bool(end.head) and text.startswith(end.head, last)
    return _Turn(start, last + len(end.head) if ended else last, not same, ended)


def _prompt(chat: ChatTemplate, messages: list[dict[str, Any]], conversation: Conversation, index: int) -> str | None:
    """What generation would be fed before turn `index`; None where the template cannot render that."""
    if index == 0:
        return None
    try:
        return chat.render(messages[:index], conversation.tools, generation_prompt=True)
    except chat.failures:
        return None


def _header(chat: ChatTemplate, messages: list[dict[str, Any]], conversation: Conversation, index: int) -> str:
    """What the template writes to let the assistant speak at turn `index`."""
    past = messages[:index] or [{"role": "user", "content": "question"}]
    try:
        before = chat.render(past, conversation.tools)
        prompt = chat.render(past, conversation.tools, generation_prompt=True)
    except chat.failures:
        return ""
    return prompt[len(before) :] if prompt.startswith(before) else ""


def _differently(
    chat: ChatTemplate,
    text: str,
    messages: list[dict[str, Any]],
    conversation: Conversation,
    index: int,
    header: str,
) -> tuple[int, int]:
    """The part of `text` that turn `index` makes, without header and end of turn."""
    plain = {"role": "assistant", "content": None}
    kept = {**messages[index], "content": None}
    end = chat.end_of_turn
    for message in (plain, kept) if kept != plain else (plain,):
        try:
            first, last = _changed(chat, text, messages, conversation, index, message)
        except UserError:
            continue
        # Words that stand for themselves are the turn, ended or not: some templates end the last turn alone.
        if not end.head or text.startswith(end.head, last) or (message == kept and messages[index]["content"]):
            return first, last
    first, last = _removed(chat, text, messages, conversation, index)
    return first + len(header) if text.startswith(header, first) else first, last


def _changed(
    chat: ChatTemplate,
    text: str,
    messages: list[dict[str, Any]],
    conversation: Conversation,
    index: int,
    message: dict[str, Any],
) -> tuple[int, int]:
    """The part of `text` that differs when message `index` is `message` with unheard-of words as its content."""
    opening, closing = _unused(text)
    words = opening + "words" + closing
    try:
        other = chat.render(
            [*messages[:index], {**message, "content": words}, *messages[index + 1 :]], conversation.tools
        )
    except chat.failures as problem:
        raise template_error(problem, where=str(conversation.origin)) from problem
    if other.count(words) != 1:
        raise UserError(
            f"cannot find what the chat template makes of message {index}: it writes its content "
            f"{other.count(words)} times",
            where=str(conversation.origin),
            fix="set model.chat_template to a template that writes every message once, or data.on_bad=skip",
        )
    first, after = _common(text, other), _common(text[::-1], other[::-1])
    return first, max(first, len(text) - after)


def _removed(
    chat: ChatTemplate, text: str, messages: list[dict[str, Any]], conversation: Conversation, index: int
) -> tuple[int, int]:
    """The part of `text`, with its header, that goes when message `index` does: for content that is not rendered."""
    end = chat.end_of_turn
    whole = end.head + end.tail
    try:
        other = chat.render([*messages[:index], *messages[index + 1 :]], conversation.tools)
    except chat.failures:
        other = text
    first, after = _common(text, other), _common(text[::-1], other[::-1])
    length = len(text) - len(other)
    if whole and length > 0 and first + after >= len(other):
        # What was taken out may begin with the same characters as what follows it, so its place is known only up to a
        # shift; its end is known: a whole end of turn.
        for start in range(first, len(other) - after - 1, -1):
            if text.endswith(whole, 0, start + length):
                return start, start + length - len(whole)
    raise UserError(
        f"cannot find what the chat template makes of assistant message {index}",
        where=str(conversation.origin),
        fix="set model.chat_template to a template that writes every assistant turn, or data.on_bad=skip",
    )


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _unused(text: str) -> tuple[str, str]:
    """Two characters for private use that `text` does not hold."""
    free = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    return next(free), next(free)
