"""Renders a conversation, checks that the text has all that the record has, and locates the turns of the assistant in
it.

Some templates leave out what they do not know, in silence; a model trained on the rest would learn to answer nothing
where it should call, to call what it was not offered, or to answer what it was not asked.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence

from meshtune.config.data_options import Reasoning
from meshtune.data.chat import ChatTemplate, template_error
from meshtune.data.conversation import Conversation, Document, JsonObject, Message, Text, argument_texts, tool_name
from meshtune.data.dialect import has_reasoning, reasoning_of, split_reasoning, with_reasoning
from meshtune.errors import UserError, amount


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


_SWITCH = re.compile(r"(?<!\S)/\w+(?!\S)")  # SmolLM3's /no_think, which its template reads and does not write


def render_conversation(chat: ChatTemplate, conversation: Conversation) -> Rendered:
    """The conversation as the template writes it. Raises UserError naming the record, with the template's own message
    where it cannot render it, and for what it leaves out: but for calls, which are looked for in their turns."""
    if uses_tools(conversation) or any(map(reasoning_of, conversation.messages)):
        check_template_can_write(chat, conversation)
    messages = chat.messages(conversation)
    try:
        text = chat.render(messages, conversation.tools, options=conversation.variables)
    except chat.failures as problem:
        raise template_error(problem, where=str(conversation.origin), fix=_fix(chat, conversation)) from problem
    view = Rendered(chat, conversation, messages, text)
    if conversation.variables:
        check_variables_are_read(chat, conversation)
    check_messages_are_written(view)
    if conversation.tools:
        _check_tools_are_written(view)
    if has_reasoning(conversation.messages[-1]):
        _check_reasoning_is_written(view)
    return view


def uses_tools(conversation: Conversation) -> bool:
    """Whether a conversation offers tools, calls them, or has results of them."""
    return bool(conversation.tools) or any(
        message.tool_calls or message.role == "tool" for message in conversation.messages
    )


def check_template_can_write(chat: ChatTemplate, conversation: Conversation) -> None:
    """Raises UserError for tools, calls, results or reasoning of a conversation that the template never writes."""
    messages, where = conversation.messages, str(conversation.origin)
    if uses_tools(conversation):
        dialect = chat.dialect
        calls = [tool_name(call) for message in messages for call in message.tool_calls]
        if calls and not dialect.writes_calls:
            raise _not_written(chat, conversation, f"the assistant's tool calls: {', '.join(calls)}")
        if conversation.tools and not dialect.writes_tools:
            raise _not_written(chat, conversation, f"tools: {', '.join(map(tool_name, conversation.tools))}")
        if calls and any(message.role == "tool" for message in messages) and not dialect.writes_results:
            raise _not_written(chat, conversation, "results of tool calls")
        beside = [n for n, message in enumerate(messages) if message.tool_calls and message.content.strip()]
        if beside and not dialect.writes_text:
            raise UserError(
                f"the chat template does not write the text before the calls of message {beside[0]}",
                where=where,
                fix=f"leave out the text of turns that call tools; or {_fix(chat, conversation)}",
            )
    if any(reasoning_of(message) for message in messages) and chat.dialect.reasoning_key is None:
        raise UserError(
            "the chat template does not write reasoning, which the record has",
            where=where,
            fix=_reasoning_fix(chat, conversation),
        )


def _reasoning_fix(chat: ChatTemplate, conversation: Conversation) -> str:
    """The fix for reasoning that the template does not write: the choices that were tried on the conversation."""
    fixes, in_field = [], any(map(reasoning_of, conversation.messages))
    effects: dict[Reasoning, str] = {"inline": "write it as <think> text before the answer", "drop": "leave it out"}
    for choice, effect in effects.items():
        if choice == "inline" and not in_field:
            continue  # it is such text already
        try:
            render_conversation(chat, with_reasoning(conversation, choice, None))
        except UserError:
            continue
        fixes.append(f"set data.reasoning: {choice} to {effect}")
    return "; or ".join([*fixes, _fix(chat, conversation)])


def check_variables_are_read(chat: ChatTemplate, conversation: Conversation) -> None:
    """Raises UserError for a variable of the record that the template does not read."""
    unread = [name for name in conversation.variables if name not in chat.variables]
    if unread:
        raise UserError(
            f"the chat template does not read chat_template_kwargs of the record: {', '.join(unread)}",
            where=str(conversation.origin),
            fix="set model.chat_template to one that does; or columns: {chat_template_kwargs: null} of the source, "
            "which leaves them out",
        )


def check_messages_are_written(view: Rendered, *, generation_prompt: bool = False) -> None:
    """Raises UserError for a message whose words are not in the rendered text. White space at the ends of a message,
    and reasoning that begins it, may be left out."""
    unwritten = _unwritten(view, generation_prompt)
    messages = view.conversation.messages[: len(view.messages)]
    contents = [_answer(message).strip() for message in messages]
    if any(message.pictures for message in messages):
        _check_pictures_are_written(view, messages)
        contents = ["" if message.pictures else content for message, content in zip(messages, contents, strict=True)]
    if unwritten or not _are_in_order(contents, view.text):
        _check_each_message(view, contents, unwritten)


def _check_pictures_are_written(view: Rendered, messages: Sequence[Message]) -> None:
    """Raises UserError unless the text has a placeholder for each picture, and the words around them."""
    reader, pictures = view.chat.pictures, sum(len(message.pictures) for message in messages)
    written = 0 if reader is None else view.text.count(reader.placeholder)
    if written != pictures:
        raise UserError(
            f"the chat template writes {written} of the record's {amount(pictures, 'picture')}",
            where=str(view.conversation.origin),
            fix=_fix(view.chat, view.conversation),
        )
    for index, message in enumerate(messages):
        for part in message.parts if message.pictures else ():
            content = str(part.get("text", "")).strip()
            if content not in view.text:
                raise _message_error(view, index, content)


def _check_each_message(view: Rendered, contents: Sequence[str], unwritten: frozenset[int]) -> None:
    text, messages = view.text, view.conversation.messages[: len(view.messages)]
    verbatim = [content for content in contents if content and content in text]
    for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
        if not content:
            continue
        if index not in unwritten and content in text:
            # An answer that another message quotes has to be there as often as the messages have it.
            if message.role != "assistant" or text.count(content) >= sum(
                map(str.count, verbatim, itertools.repeat(content))
            ):
                continue
            raise _message_error(view, index, content)
        if index in unwritten or not _is_written_otherwise(view, index, content):
            raise _message_error(view, index, content)


def _answer(message: Message) -> str:
    """The content of a message, without the reasoning that begins it."""
    if message.role == "assistant" and "</think>" in message.content:
        return split_reasoning(message.content)[1]
    return message.content


def _are_in_order(contents: Sequence[str], text: str) -> bool:
    """Whether a text has all of `contents` one after another."""
    end = 0
    for content in contents:
        begin = text.find(content, end)
        if begin < 0:
            return False
        end = begin + len(content)
    return True


def _unwritten(view: Rendered, generation_prompt: bool) -> frozenset[int]:
    """The messages that the template does not write in conversations of this shape, found once for each shape by
    rendering unique words in their places."""
    conversation = view.conversation
    shape = (
        *[(message["role"], not message["content"], *message) for message in view.messages],
        not conversation.tools,
        repr(conversation.variables) if conversation.variables else "",
        generation_prompt,
    )
    lost = view.chat.unwritten.get(shape)
    if lost is None:
        contents = [message["content"] for message in view.messages]
        texts = [n for n, content in enumerate(contents) if isinstance(content, str) and content.strip()]
        marks = {n: f"\ue000{n}\ue001" for n in texts}
        probes = [{**message, "content": marks.get(n, message["content"])} for n, message in enumerate(view.messages)]
        text = view.render(probes, generation_prompt=generation_prompt)
        lost = frozenset(index for index, mark in marks.items() if text is not None and mark not in text)
        if len(view.chat.unwritten) > 4096:
            view.chat.unwritten.clear()
        view.chat.unwritten[shape] = lost
    return lost


def _is_written_otherwise(view: Rendered, index: int, content: str) -> bool:
    """Whether the text has the words of message `index` in another spelling: as JSON, with other white space, as the
    values of a tool's result, or without switches that the template reads."""
    if any(form in view.text for _, forms in argument_texts(content) for form in forms):
        return True
    if "</think>" in content:
        return False
    text = _without_space(view.text)
    if _without_space(content) in text:
        return True
    if view.conversation.messages[index].role == "tool":
        return _values_are_written(content, view.text)
    without_switches = _SWITCH.sub("", content)
    if without_switches == content or _without_space(without_switches) not in text:
        return False
    messages = [
        *view.messages[:index],
        {**view.messages[index], "content": without_switches},
        *view.messages[index + 1 :],
    ]
    return all(switch in view.text for switch in _SWITCH.findall(content)) or view.render(messages) != view.text


def _values_are_written(result: str, text: str) -> bool:
    """Whether a text has every key and value of a tool's result that is JSON."""
    try:
        value = json.loads(result)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list) and all(
        any(form in text for form in forms) for _, forms in argument_texts(value)
    )


def _without_space(text: str) -> str:
    return "".join(text.split())


def _message_error(view: Rendered, index: int, content: str) -> UserError:
    message = view.conversation.messages[index]
    problem = f"the chat template does not write message {index} ({message.role}) of the record: {content[:60]!r}"
    fix = _fix(view.chat, view.conversation)
    if message.role == "assistant" and "</think>" in content:
        problem = (
            f"the chat template takes words of message {index} (assistant) for reasoning, at the </think> in them: "
        )
        problem += repr(content[:60])
        marked = "if what is before it is reasoning, put <think> before that; or "
        fix = f"write the tag in other words; or {marked if view.chat.dialect.reasoning_key else ''}{fix}"
    elif message.role == "system":
        fix = f"move its words into the first message of the user (or leave out data.system, if it is that); or {fix}"
    return UserError(problem, where=str(view.conversation.origin), fix=fix)


def check_has_place(document: Document) -> None:
    """Raises UserError for a text that was to have a system prompt, which only a chat template writes."""
    if not isinstance(document, Text) or not document.system_prompt:
        return
    raise UserError(
        "data.system is not written before a text, which has no chat template",
        where=str(document.origin),
        fix="leave data.system out; or, for records of prompt and completion, format: alpaca, columns: {instruction: "
        "prompt, output: completion} makes them conversations",
    )


def _check_tools_are_written(view: Rendered) -> None:
    """Raises UserError if a rendered conversation lacks the name or a parameter of a tool that it offers."""
    tools, text = view.conversation.tools, view.text
    lost = [name for name in map(tool_name, tools) if name not in text]
    if lost:
        raise _not_written(view.chat, view.conversation, f"tools: {', '.join(lost)}")
    for tool in tools:
        lost = [
            name
            for name in _parameters(tool)
            if not any(form in text for _, forms in argument_texts(name) for form in forms)
        ]
        if lost:
            part = f"the parameters of the tool {tool_name(tool)}: {', '.join(lost)}"
            fix = 'write them as a JSON schema, {"type": "object", "properties": {...}}; or '
            fix += _fix(view.chat, view.conversation)
            raise UserError(f"the chat template does not write {part}", where=str(view.conversation.origin), fix=fix)


def _parameters(tool: JsonObject) -> list[str]:
    """The names of a tool's parameters, in a JSON schema or without one."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(parameters, Mapping):
        return []
    properties = parameters.get("properties", parameters)
    return (
        [str(key) for key, value in properties.items() if isinstance(value, Mapping)]
        if isinstance(properties, Mapping)
        else []
    )


def check_calls_are_written(view: Rendered, index: int, text: str) -> None:
    """Raises UserError if the rendered turn `text` lacks the name or an argument of a call of message `index`."""
    calls = view.conversation.messages[index].tool_calls
    lost = [name for name in map(tool_name, calls) if name not in text]
    if lost:
        raise _not_written(view.chat, view.conversation, f"the assistant's tool calls: {', '.join(lost)}")
    for call in calls:
        function = call["function"]
        arguments = function["arguments"] if isinstance(function, dict) else None
        for content, spellings in argument_texts(arguments):
            if not any(spelling in text for spelling in spellings):
                part = f"the argument {content[:60]!r} of the call of {tool_name(call)} (message {index})"
                raise _not_written(view.chat, view.conversation, part)


def _check_reasoning_is_written(view: Rendered) -> None:
    """Raises UserError if a rendered conversation lacks the reasoning of its last turn, in whichever form it was given.

    Most templates leave out that of earlier turns, as in generation.
    """
    message = view.conversation.messages[-1]
    reasoning = reasoning_of(message) or split_reasoning(message.content)[0]
    if reasoning.strip() not in view.text:
        raise UserError(
            "the chat template leaves out the reasoning of the last turn",
            where=str(view.conversation.origin),
            fix=_reasoning_fix(view.chat, view.conversation),
        )


def _not_written(chat: ChatTemplate, conversation: Conversation, part: str) -> UserError:
    where = str(conversation.origin)
    return UserError(f"the chat template does not write {part}", where=where, fix=_fix(chat, conversation))


def _fix(chat: ChatTemplate, conversation: Conversation) -> str:
    """The fix for a template that cannot write a conversation: a shipped one that can, if any."""
    skip = "set data.on_bad=skip to leave such records out"
    for name, alternative in chat.alternatives.items():
        try:
            view = render_conversation(alternative, conversation)
            for index in range(len(conversation.messages)):
                check_calls_are_written(view, index, view.text)
        except UserError:
            continue
        return f"set model.chat_template: {name}, which ships with Meshtune and writes the whole record; or {skip}"
    return f"change the record; or {skip}"
