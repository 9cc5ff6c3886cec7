"""Calls whose arguments are JSON: Llama's and Mistral's lists, names before arguments, DeepSeek's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from meshtune.serve.responses.call import ToolCall, Tools, call_from_json, call_of

_DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"^([^\n]+)\n```json\n(.*)\n```$", re.DOTALL)


def read_list(text: str, tools: Tools) -> list[ToolCall]:
    """A call as a JSON object, a JSON list of them, or objects parted by semicolons (Llama). Raises ValueError."""
    remainder, calls, decoder = text.strip(), [], json.JSONDecoder()
    while remainder:
        value, end = decoder.raw_decode(remainder)
        calls += [call_from_json(entry) for entry in (value if isinstance(value, list) else [value])]
        remainder = remainder[end:].lstrip().removeprefix(";").lstrip()
    return calls


def read_named(opens: str, parts: str) -> Callable[[str, Tools], list[ToolCall]]:
    """Reads calls of the form NAME, `parts`, JSON; `opens` begins each one after the first."""

    def read(text: str, tools: Tools) -> list[ToolCall]:
        calls = []
        for piece in text.split(opens):
            name, between, arguments = piece.partition(parts)
            if not between:
                raise ValueError(f"a call has {parts} after its name")
            calls.append(call_of(name.strip(), json.loads(arguments)))
        return calls

    return read


def read_deepseek(text: str, tools: Tools) -> list[ToolCall]:
    """DeepSeek's calls: a name and JSON (V3.1), or `function`, a name and fenced JSON (V3, R1). Raises ValueError."""
    calls = []
    for name, arguments in _DEEPSEEK_CALL.findall(text):
        if fenced := _FENCED.match(arguments.strip()):
            name, arguments = fenced.groups()
        calls.append(call_of(name.strip(), json.loads(arguments)))
    if _DEEPSEEK_CALL.sub("", text).strip():
        raise ValueError("there is text between calls")
    return calls
