"""Loss masks of rendered conversations, found by rendering and comparing, never by searching for marker strings.

The text of an assistant turn that is trained on is what generation must emit: from the end of the generation prompt
(the rendering of all turns before with `add_generation_prompt`) through the end-of-turn token. Some templates render
earlier turns differently once later ones exist (Qwen3 drops old reasoning, Mistral moves the system prompt). The turn
is then located by rendering the conversation again with other content in its place and comparing the two texts, and
counted in `prompts_differ`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from meshtune.config.data_options import LossPolicy
from meshtune.data.chat import ChatTemplate, as_dicts, template_error
from meshtune.data.chat_templates import tool_template_names
from meshtune.data.conversation import Conversation, JsonObject
from meshtune.errors import UserError


@dataclasses.dataclass(frozen=True)
class MaskedText:
    """A text with loss weights: `spans` are disjoint, ordered (start, end, weight); elsewhere the weight is `default`.

    `prompts_differ` counts assistant turns whose prompt is rendered otherwise in generation, `unended` those without an
    end of turn after them. `tools_unseen` says that the conversation offers tools that the template does not write.
    """

    text: str
    spans: tuple[tuple[int, int, float], ...]
    default: float = 0.0
    prompts_differ: int = 0
    unended: int = 0
    tools_unseen: bool = False


@dataclasses.dataclass(frozen=True)
class _Turn:
    """The characters of an assistant turn, whether its prompt differs from generation's, and whether it is ended."""

    start: int
    end: int
    differs: bool
    ended: bool


def mask_conversation(chat: ChatTemplate, conversation: Conversation, policy: LossPolicy = LossPolicy()) -> MaskedText:
    """Renders a conversation and computes its loss mask.

    Raises UserError naming the record, with the template's own message where it cannot render the conversation.
    """
    messages = as_dicts(conversation)
    where = str(conversation.origin)
    try:
        text = chat.render(messages, conversation.tools)
    except chat.failures as problem:
        raise template_error(problem, where=where, fix=_tool_fix() if _uses_tools(conversation) else None) from problem
    assistants = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
    trained = assistants[-1:] if policy.last_turn_only else assistants
    spans, floor, differ, unended = [], 0, 0, 0
    for index, message in enumerate(conversation.messages):
        if index in trained:
            turn = _turn(chat, text, messages, conversation, index, floor)
            _check_calls_are_written(message.tool_calls, text[turn.start : turn.end], where)
            spans.append((turn.start, turn.end, 1.0 if message.weight is None else message.weight))
            floor = turn.end
            differ += turn.differs
            unended += not turn.ended
        elif message.weight is not None and message.role != "assistant" and not policy.last_turn_only:
            start, end = _changed(chat, text, messages, conversation, index, {**messages[index], "content": None})
            spans.append((max(start, floor), max(end, floor), message.weight))
            floor = max(end, floor)
    unseen = any(_tool_name(tool) not in text for tool in conversation.tools)
    return MaskedText(text, tuple(spans), float(policy.train_on_prompt), differ, unended, unseen)


def _check_calls_are_written(calls: Sequence[JsonObject], turn: str, where: str) -> None:
    """Raises UserError if a rendered turn lacks its tool calls: the model would learn to answer nothing instead."""
    lost = [name for name in map(_tool_name, calls) if name not in turn]
    if lost:
        raise UserError(
            f"the chat template does not write the assistant's tool calls: {', '.join(lost)}",
            where=where,
            fix=_tool_fix(),
        )


def _tool_fix() -> str:
    names = ", ".join(tool_template_names())
    return (
        f"set model.chat_template to one that writes tool calls: {names} ship with Meshtune, and the templates of most "
        "instruct models do; or set data.on_bad=skip to leave such records out"
    )


def _uses_tools(conversation: Conversation) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in conversation.messages)


def _tool_name(tool: JsonObject) -> str:
    """The name of a tool or of a call, in OpenAI's form or bare."""
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def _turn(
    chat: ChatTemplate, text: str, messages: list[dict[str, object]], conversation: Conversation, index: int, floor: int
) -> _Turn:
    """Locates the assistant turn `index` in `text`, at or after `floor`."""
    end = chat.end_of_turn
    prompt = _prompt(chat, messages, conversation, index)
    unchanged = prompt is not None and len(prompt) >= floor and text.startswith(prompt)
    if unchanged and prompt is not None:
        start = len(prompt)
        if index == len(messages) - 1 and text.endswith(end.head + end.tail) and len(text) - len(end.tail) >= start:
            return _Turn(start, len(text) - len(end.tail), False, bool(end.head))
        content = conversation.messages[index].content
        if content and end.head and "tool_calls" not in messages[index]:
            for written in (content, content.strip()):
                # The whole content followed by the end of turn proves where the turn lies.
                if text.startswith(written + end.head, start):
                    return _Turn(start, start + len(written) + len(end.head), False, True)
    header = _header(chat, messages, conversation, index)
    first, last = _content_span(chat, text, messages, conversation, index, header)
    if unchanged and prompt is not None:
        start = len(prompt)
    else:
        # The turn begins where its header ends. That is before the first character that depends on its content if the
        # template inserts something of its own there, such as an empty block of reasoning.
        header_start = text.rfind(header, floor, first) if header else -1
        start = header_start + len(header) if header_start >= 0 else first
    start = max(start, floor)
    last = max(last, start)
    ended = bool(end.head) and text.startswith(end.head, last)
    return _Turn(start, last + len(end.head) if ended else last, not unchanged, ended)


def _prompt(
    chat: ChatTemplate, messages: list[dict[str, object]], conversation: Conversation, index: int
) -> str | None:
    """The prompt that generation would be given for turn `index`; None where the template cannot render it."""
    if index == 0:
        return None
    try:
        return chat.render(messages[:index], conversation.tools, generation_prompt=True)
    except chat.failures:
        return None


def _header(chat: ChatTemplate, messages: list[dict[str, object]], conversation: Conversation, index: int) -> str:
    """What the template writes to start the assistant's turn at `index`."""
    past = messages[:index] or [{"role": "user", "content": "question"}]
    try:
        before = chat.render(past, conversation.tools)
        prompt = chat.render(past, conversation.tools, generation_prompt=True)
    except chat.failures:
        return ""
    return prompt[len(before) :] if prompt.startswith(before) else ""


def _content_span(
    chat: ChatTemplate,
    text: str,
    messages: list[dict[str, object]],
    conversation: Conversation,
    index: int,
    header: str,
) -> tuple[int, int]:
    """The part of `text` that assistant turn `index` contributes, without its header and end of turn."""
    bare = {"role": "assistant", "content": None}
    complete = {**messages[index], "content": None}
    end = chat.end_of_turn
    for message in (bare, complete) if complete != bare else (bare,):
        try:
            first, last = _changed(chat, text, messages, conversation, index, message)
        except UserError:
            continue
        # Content that is written verbatim is the turn, ended or not: some templates end only the last turn.
        if not end.head or text.startswith(end.head, last) or (message == complete and messages[index]["content"]):
            return first, last
    first, last = _removed(chat, text, messages, conversation, index)
    return first + len(header) if text.startswith(header, first) else first, last


def _changed(
    chat: ChatTemplate,
    text: str,
    messages: list[dict[str, object]],
    conversation: Conversation,
    index: int,
    message: Mapping[str, object],
) -> tuple[int, int]:
    """The part of `text` that differs once message `index` is replaced by `message` with a unique content."""
    opening, closing = _unused_characters(text)
    content = opening + "words" + closing
    try:
        changed = chat.render(
            [*messages[:index], {**message, "content": content}, *messages[index + 1 :]], conversation.tools
        )
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


def _removed(
    chat: ChatTemplate, text: str, messages: list[dict[str, object]], conversation: Conversation, index: int
) -> tuple[int, int]:
    """The part of `text`, with its header, that is missing once message `index` is removed. For turns whose content is
    not rendered."""
    end = chat.end_of_turn
    ending = end.head + end.tail
    try:
        shorter = chat.render([*messages[:index], *messages[index + 1 :]], conversation.tools)
    except chat.failures:
        shorter = text
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
