"""Calls between tags: JSON (Hermes, Qwen), and arguments in tags of their own (Qwen3.5, GLM, MiniMax)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from meshtune.serve.responses.call import Tool, ToolCall, Tools, call_from_json, call_of, typed_argument
from meshtune.serve.responses.lark import Lark

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKE = re.compile(r'<invoke name="([^"]+)">(.*?)</invoke>', re.DOTALL)
_NAMED = re.compile(r'<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL)


def read_tagged(text: str, tools: Tools) -> list[ToolCall]:
    """The calls between <tool_call> and </tool_call>, in any of three forms. Raises ValueError for a text that is no
    call."""
    text = text.strip()
    if text.startswith("{"):
        return [call_from_json(json.loads(text))]
    if text.startswith("<function="):
        return _calls(_FUNCTION, _PARAMETER, text, tools)
    name = re.split(r"\n|<arg_key>", text, maxsplit=1)[0]
    return [_call(name.strip(), _PAIR, text[len(name) :], tools)]


def read_invocations(text: str, tools: Tools) -> list[ToolCall]:
    """MiniMax's calls. Raises ValueError for a text that is no call."""
    return _calls(_INVOKE, _NAMED, text, tools)


def tagged_arguments(head: str, tail: str, after: str = "") -> Callable[[Lark, Tool], str]:
    """The grammar of arguments that are each between `head` (with the name in place of KEY) and `tail`, followed by
    `after`: strings unchanged, all else as JSON; those that are not required may be missing."""

    def grammar(lark: Lark, tool: Tool) -> str:
        parts = []
        for key, schema in tool.properties.items():
            is_text = isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
            value = lark.until(tail) if is_text else f"{_value(lark, schema, tool)} {lark.literal(tail)}"
            part = " ".join(filter(None, [lark.literal(head.replace("KEY", key)), value, lark.literal(after)]))
            parts.append(part if key in tool.required else f"({part})?")
        return " ".join(parts)

    return grammar


def _value(lark: Lark, schema: object, tool: Tool) -> str:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return "(" + " | ".join(lark.literal(str(choice)) for choice in schema["enum"]) + ")"
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return lark.json({**schema, **definitions} if isinstance(schema, dict) else {})


def _calls(call: re.Pattern[str], argument: re.Pattern[str], text: str, tools: Tools) -> list[ToolCall]:
    if call.sub("", text).strip() or not call.search(text):
        raise ValueError("there is text that belongs to no call")
    return [_call(name.strip(), argument, body, tools) for name, body in call.findall(text)]


def _call(name: str, argument: re.Pattern[str], body: str, tools: Tools) -> ToolCall:
    if not re.fullmatch(r"[\w.:/-]+", name) or argument.sub("", body).strip():
        raise ValueError("a call has a name and arguments in tags")
    properties = tools[name].properties if name in tools else {}
    return call_of(
        name, {key.strip(): typed_argument(value, properties.get(key.strip())) for key, value in argument.findall(body)}
    )
