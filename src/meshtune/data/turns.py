"""Locates the assistant's turns in a rendered conversation, by rendering other conversations and comparing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from meshtune.data.chat import ChatTemplate, template_error
from meshtune.data.conversation import Conversation, JsonObject
from meshtune.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation, its messages as the template reads them, and the text that the template makes of them."""

    chat: ChatTemplate
    conversation: Conversation
    messages: list[dict[str, object]]
    text: str

    def render_strictly(self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool = False) -> str:
        """The text of other messages with the same tools and variables. Raises one of the chat's `failures`."""
        tools, variables = self.conversation.tools, self.conversation.variables
        return self.chat.render(messages, tools, generation_prompt=generation_prompt, options=variables)

    def render(self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool = False) -> str | None:
        """As `render_strictly`; None where the template refuses the messages."""
        try:
            return self.render_strictly(messages, generation_prompt=generation_prompt)
        except self.chat.failures:
            return None


@dataclasses.dataclass(frozen=True)
class Turn:
    """The characters of an assistant turn, whether its prompt differs from generation's, and whether it is ended."""

    start: int
    end: int
    differs: bool
    ended: bool


def locate_turn(view: Rendered, index: int, floor: int) -> Turn:
    """Locates the assistant turn `index` in a rendered conversation, at or after `floor`.

    Raises UserError where that cannot be done.
    """
    chat, text, messages, conversation = view.chat, view.text, view.messages, view.conversation
    end = chat.end_of_turn
    prompt = _prompt(view, index)
    if conversation.messages[index].tool_calls:
        return _turn_of_calls(view, index, floor, prompt)
    unchanged = prompt is not None and len(prompt) >= floor and text.startswith(prompt)
    if unchanged and prompt is not None:
        start = len(prompt)
        if index == len(messages) - 1 and text.endswith(end.head + end.tail) and len(text) - len(end.tail) >= start:
            return Turn(start, len(text) - len(end.tail), False, bool(end.head))
    return _turn_by_content(view, index, floor, prompt if unchanged else None)


def _turn_by_content(view: Rendered, index: int, floor: int, prompt: str | None) -> Turn:
    """Locates a turn by its content, which the end of turn follows, or by rendering other words in its place. `prompt`
    is the prompt of generation, if the text begins with that."""
    text, end, content = view.text, view.chat.end_of_turn, view.conversation.messages[index].content
    if prompt is not None and content and end.head:
        for written in (content, content.strip()):
            if text.startswith(written + end.head, len(prompt)):
                return Turn(len(prompt), len(prompt) + len(written) + len(end.head), False, True)
    header = _header(view, index)
    first, last = _content_span(view, index, header)
    # Unless generation is prompted with the text itself, the turn begins where its header ends: before the first
    # character that depends on its content if the template inserts something, such as an empty block of reasoning.
    start = max(_end_of_header(view, header, floor, first) if prompt is None else len(prompt), floor)
    last = max(last, start)
    ended = bool(end.head) and text.startswith(end.head, last)
    return Turn(start, last + len(end.head) if ended else last, prompt is None, ended)


def _turn_of_calls(view: Rendered, index: int, floor: int, prompt: str | None) -> Turn:
    """Locates a turn that calls tools: from the end of its prompt through what ends turns of calls."""
    text, chat = view.text, view.chat
    unchanged = prompt is not None and len(prompt) >= floor and text.startswith(prompt)
    start = len(prompt) if unchanged and prompt is not None else _start_of_calls(view, index, floor)
    until = view.render(view.messages[: index + 1])
    if until is not None and text.startswith(until) and len(until.rstrip()) > start:
        end = len(until.rstrip())
    else:
        # What was written before differs once later turns exist. The calls end before the next message does.
        ending = chat.dialect.call_end
        end = text.rfind(ending, start, _start_of_next(view, index)) + len(ending) if ending else -1
        if end < start + len(ending):
            raise UserError(
                f"cannot locate the tool calls of message {index} in the rendered conversation",
                where=str(view.conversation.origin),
                fix="set model.chat_template to a template that writes calls as they were generated, or "
                "data.on_bad=skip",
            )
    turn_end, special = chat.end_of_turn.head, chat.special_tokens
    ended = (bool(turn_end) and text.endswith(turn_end, start, end)) or text.endswith(special, start, end)
    return Turn(start, end, not unchanged, ended)


def _start_of_calls(view: Rendered, index: int, floor: int) -> int:
    """Where a turn of calls begins whose prompt is written differently in generation.

    Words in place of the calls begin where the turn does, or where its header does that generation is prompted with.
    """
    first = _start_of_words(view, index, floor)
    if first is None:
        name, _ = _unused_characters(view.text)
        calls = view.messages[index]["tool_calls"]
        assert isinstance(calls, list)
        messages = list(view.messages)
        messages[index] = {**messages[index], "tool_calls": [_rename_call(call, name) for call in calls]}
        changed = view.render(messages)
        return floor if changed is None else max(_common_prefix(view.text, changed), floor)
    return max(_end_of_header(view, _header(view, index), floor, first), floor)


def _start_of_words(view: Rendered, index: int, floor: int) -> int | None:
    """Where the text changes if the turn of calls `index` has words instead, without the results of its calls; None
    where the template refuses that. Results and further turns remain where it demands them."""
    messages, placeholder = view.messages, "".join(_unused_characters(view.text))
    roles = [message["role"] for message in messages]
    results = next((n for n in range(index + 1, len(roles)) if roles[n] != "tool"), len(roles))
    question = next((n for n in range(index + 1, len(roles)) if roles[n] == "user"), len(roles))
    for position in (results, index + 1, question):
        changed = view.render([*messages[:index], {"role": "assistant", "content": placeholder}, *messages[position:]])
        if changed is not None and changed.count(placeholder) == 1:
            first = _common_prefix(view.text, changed)
            if first >= floor:
                return first
    return None


def _end_of_header(view: Rendered, header: str, floor: int, first: int) -> int:
    """The end of the header of the turn whose own words begin at `first`, or `first` where it is not written."""
    start = view.text.rfind(header, floor, first) if header else -1
    end = start + len(header)
    ending = view.chat.end_of_turn.head
    return first if start < 0 or (ending and ending in view.text[end:first]) else end


def _rename_call(call: JsonObject, name: str) -> JsonObject:
    function = call["function"]
    assert isinstance(function, Mapping)
    return {**call, "function": {**function, "name": name}}


def _start_of_next(view: Rendered, index: int) -> int:
    """A position in the text at or before the content of the message after `index`, the end if there is none."""
    if index + 1 == len(view.messages):
        return len(view.text)
    messages = list(view.messages)
    messages[index + 1] = {**messages[index + 1], "content": "".join(_unused_characters(view.text))}
    changed = view.render(messages)
    return 0 if changed is None else _common_prefix(view.text, changed)


def _prompt(view: Rendered, index: int) -> str | None:
    """The prompt that generation would be given for turn `index`; None where the template cannot render it."""
    return view.render(view.messages[:index], generation_prompt=True) if index else None


def _header(view: Rendered, index: int) -> str:
    """The text that the template writes to start the assistant's turn at `index`."""
    past = view.messages[:index] or [{"role": "user", "content": "question"}]
    before, prompt = view.render(past), view.render(past, generation_prompt=True)
    return prompt[len(before) :] if before is not None and prompt is not None and prompt.startswith(before) else ""


def _content_span(view: Rendered, index: int, header: str) -> tuple[int, int]:
    """The part of the text that assistant turn `index` contributes, without its header and end of turn."""
    chat, text, messages = view.chat, view.text, view.messages
    bare = {"role": "assistant", "content": None}
    complete = {**messages[index], "content": None}
    end = chat.end_of_turn
    for message in (bare, complete) if complete != bare else (bare,):
        try:
            first, last = changed_part(view, index, message)
        except UserError:
            continue
        # Content that is written verbatim is the turn, ended or not: some templates end only the last turn.
        if not end.head or text.startswith(end.head, last) or (message == complete and messages[index]["content"]):
            return first, last
    first, last = _removed_span(view, index)
    return first + len(header) if text.startswith(header, first) else first, last


def changed_part(view: Rendered, index: int, message: Mapping[str, object]) -> tuple[int, int]:
    """The part of the text that differs once message `index` is replaced by `message` with a unique content.

    Raises UserError where the template does not write that content once.
    """
    chat, text, messages, conversation = view.chat, view.text, view.messages, view.conversation
    opening, closing = _unused_characters(text)
    content = opening + "words" + closing
    try:
        changed = view.render_strictly([*messages[:index], {**message, "content": content}, *messages[index + 1 :]])
    except chat.failures as problem:
        raise template_error(problem, where=str(conversation.origin)) from problem
    if changed.count(content) != 1:
        raise UserError(
            f"cannot locate message {index} in the rendered conversation: the chat template writes its content "
            f"{changed.count(content)} times",
            where=str(conversation.origin),
            fix="set model.chat_template to a template that writes every message once, or data.on_bad=skip",
        )
    prefix, suffix = _common_prefix(text, changed), _common_prefix(text[::-1], changed[::-1])
    return prefix, max(prefix, len(text) - suffix)


def _removed_span(view: Rendered, index: int) -> tuple[int, int]:
    """The part of the text, with its header, that is missing once message `index` is removed. For turns whose content
    is not rendered."""
    chat, text, messages, conversation = view.chat, view.text, view.messages, view.conversation
    end = chat.end_of_turn
    ending = end.head + end.tail
    shorter = view.render([*messages[:index], *messages[index + 1 :]])
    shorter = text if shorter is None else shorter
    prefix, suffix = _common_prefix(text, shorter), _common_prefix(text[::-1], shorter[::-1])
    length = len(text) - len(shorter)
    if ending and length > 0 and prefix + suffix >= len(shorter):
        # The removed part may begin with the same characters as what follows it, so its position is known only up to a
        # shift; but it must end with a complete end of turn.
        for start in range(prefix, len(shorter) - suffix - 1, -1):
            if text.endswith(ending, 0, start + length):
                return start, start + length - len(ending)
    raise UserError(
        f"cannot locate assistant message {index} in the rendered conversation",
        where=str(conversation.origin),
        fix="set model.chat_template to a template that writes every assistant turn, or data.on_bad=skip",
    )


def _common_prefix(first: str, second: str) -> int:
    """The length of the common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _unused_characters(text: str) -> tuple[str, str]:
    """Two characters of the private use area that do not occur in `text`."""
    unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    return next(unused), next(unused)
