"""Checks that a rendered conversation has what its record has: tools, calls with their arguments, results, reasoning.

Some templates leave out what they do not know, in silence; a model trained on the rest would learn to answer nothing
where it should call, or to call what it was not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import suggested_template
from meshtune.data.conversation import Conversation, JsonObject, Message
from meshtune.data.reasoning import reasoning_of, split_reasoning
from meshtune.data.tool_calls import argument_texts, tool_name
from meshtune.errors import UserError


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
            raise _not_written(chat, f"the assistant's tool calls: {', '.join(calls)}", where)
        if conversation.tools and not dialect.writes_tools:
            raise _not_written(chat, f"tools: {', '.join(map(tool_name, conversation.tools))}", where)
        if calls and any(message.role == "tool" for message in messages) and not dialect.writes_results:
            raise _not_written(chat, "results of tool calls", where)
        beside = [n for n, message in enumerate(messages) if message.tool_calls and message.content.strip()]
        if beside and not dialect.writes_text:
            raise UserError(
                f"the chat template does not write the text before the calls of message {beside[0]}",
                where=where,
                fix=f"leave out the text of turns that call tools; or {tool_fix(chat)}",
            )
    if any(reasoning_of(message) for message in messages) and chat.dialect.reasoning_key is None:
        raise UserError(
            "the chat template does not write reasoning, which the record has",
            where=where,
            fix="set data.reasoning: inline to write it as <think> text before the answer, or drop to leave it out",
        )


def check_tools_are_written(chat: ChatTemplate, tools: Sequence[JsonObject], text: str, where: str) -> None:
    """Raises UserError if a rendered conversation lacks the name or a parameter of a tool that it offers."""
    lost = [name for name in map(tool_name, tools) if name not in text]
    if lost:
        raise _not_written(chat, f"tools: {', '.join(lost)}", where)
    for tool in tools:
        lost = [
            name
            for name in _parameters(tool)
            if not any(form in text for _, forms in argument_texts(name) for form in forms)
        ]
        if lost:
            part = f"the parameters of the tool {tool_name(tool)}: {', '.join(lost)}"
            fix = f'write them as a JSON schema, {{"type": "object", "properties": {{...}}}}; or {tool_fix(chat)}'
            raise UserError(f"the chat template does not write {part}", where=where, fix=fix)


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


def check_calls_are_written(chat: ChatTemplate, message: Message, index: int, text: str, where: str) -> None:
    """Raises UserError if the rendered turn `text` lacks the name or an argument of a call of message `index`."""
    lost = [name for name in map(tool_name, message.tool_calls) if name not in text]
    if lost:
        raise _not_written(chat, f"the assistant's tool calls: {', '.join(lost)}", where)
    for call in message.tool_calls:
        function = call["function"]
        arguments = function["arguments"] if isinstance(function, dict) else None
        for content, spellings in argument_texts(arguments):
            if not any(spelling in text for spelling in spellings):
                part = f"the argument {content[:60]!r} of the call of {tool_name(call)} (message {index})"
                raise _not_written(chat, part, where)


def check_reasoning_is_written(chat: ChatTemplate, message: Message, text: str, where: str) -> None:
    """Raises UserError if a rendered conversation lacks the reasoning of its last turn, in whichever form it was given.

    That of earlier turns is left out by most templates, as it is in generation.
    """
    reasoning = reasoning_of(message) or split_reasoning(message.content)[0]
    if reasoning.strip() not in text:
        raise UserError(
            "the chat template leaves out the reasoning of the last turn",
            where=where,
            fix=f"set model.chat_template: {suggested_template(chat.tokenizer)}, or data.reasoning: drop",
        )


def tool_fix(chat: ChatTemplate) -> str:
    """What to do about a template that cannot write the tools of a record."""
    name = suggested_template(chat.tokenizer)
    return (
        f"set model.chat_template: {name}, which ships with Meshtune and writes tools, calls and results; "
        "or set data.on_bad=skip to leave such records out"
    )


def _not_written(chat: ChatTemplate, part: str, where: str) -> UserError:
    return UserError(f"the chat template does not write {part}", where=where, fix=tool_fix(chat))
