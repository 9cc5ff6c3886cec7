"""Renders a conversation and checks that the text has what the record has: the words of every message, tools, calls
with their arguments, results, reasoning.

Some templates leave out what they do not know, in silence; a model trained on the rest would learn to answer nothing
where it should call, to call what it was not offered, or to answer what it was not asked.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence

from meshtune.config.data_options import Reasoning
from meshtune.data.chat import ChatTemplate, template_error
from meshtune.data.conversation import Conversation, Document, JsonObject, Message, Text
from meshtune.data.reasoning import has_reasoning, reasoning_of, split_reasoning, with_reasoning
from meshtune.data.tool_calls import argument_texts, tool_name
from meshtune.data.turns import Rendered
from meshtune.errors import UserError

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
    contents = [_answer(message).strip() for message in view.conversation.messages[: len(view.messages)]]
    if unwritten or not _are_in_order(contents, view.text):
        _check_each_message(view, contents, unwritten)


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
