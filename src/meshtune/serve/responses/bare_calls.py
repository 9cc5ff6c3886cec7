"""Calls written as in a programming language: LFM2's in Python's form, Gemma 4's with quotes that are tokens."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.serve.responses.call import Tool, ToolCall, Tools, call_from_json, call_of
from meshtune.serve.responses.lark import Lark

_JSON_NAMES = {"true": True, "false": False, "null": None}
_GEMMA_CALL = re.compile(r"call:([\w.:/-]+)(\{.*\})", re.DOTALL)
_GEMMA_QUOTE = '<|"|>'


def read_pythonic(text: str, tools: Tools) -> list[ToolCall]:
    """Calls as [name(key="value", n=5), ...], or as a JSON list. Raises ValueError for a text that is neither."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as problem:
        raise ValueError("the calls are not Python") from problem
    entries = tree.elts if isinstance(tree, ast.List) else [tree]
    return [_pythonic_call(entry) for entry in entries]


def _pythonic_call(entry: ast.expr) -> ToolCall:
    if isinstance(entry, ast.Dict):
        return call_from_json(_literal(entry))
    if not isinstance(entry, ast.Call) or entry.args or any(word.arg is None for word in entry.keywords):
        raise ValueError("a call has a name and named arguments")
    return call_of(ast.unparse(entry.func), {str(word.arg): _literal(word.value) for word in entry.keywords})


def _literal(node: ast.expr) -> Any:
    """A literal, with JSON's true, false and null. Raises ValueError for an expression."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_literal(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            return {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case _:
            return ast.literal_eval(node)


def keyword_arguments(lark: Lark, tool: Tool) -> str:
    """The grammar of key=value, ... with JSON values."""

    def value(schema: Any) -> str:
        return lark.json(schema if isinstance(schema, Mapping) else {})

    return _list_entries(
        lark, tool, {key: f"{lark.literal(key + '=')} {value(s)}" for key, s in tool.properties.items()}, ", "
    )


def read_gemma(text: str, tools: Tools) -> list[ToolCall]:
    """Gemma 4's call:name{key:value,...}, whose strings are between quote tokens. Raises ValueError."""
    call_match = _GEMMA_CALL.fullmatch(text.strip())
    if call_match is None:
        raise ValueError("a call has a name and arguments in braces")
    strings: list[str] = []
    bare = []
    for n, part in enumerate(call_match.group(2).split(_GEMMA_QUOTE)):
        if n % 2:
            strings.append(part)
            bare.append(f"\x00{len(strings) - 1}\x00")
        else:
            bare.append(re.sub(r"(?<=[{,])\s*([^\s{}\[\],:\x00]+)\s*:", r'"\1":', part))
    joined = re.sub("\x00(\\d+)\x00", lambda match: json.dumps(strings[int(match.group(1))]), "".join(bare))
    return [call_of(call_match.group(1), json.loads(joined))]


def gemma_arguments(lark: Lark, tool: Tool) -> str:
    """The grammar of {key:value,...} in Gemma 4's form."""
    entries = {key: f"{lark.literal(key + ':')} {_gemma_value(lark, s)}" for key, s in tool.properties.items()}
    return f'"{{" {_list_entries(lark, tool, entries, ",")} "}}"'


def _gemma_value(lark: Lark, schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and "enum" in schema:
        quoted = [f"{_GEMMA_QUOTE}{c}{_GEMMA_QUOTE}" if isinstance(c, str) else json.dumps(c) for c in schema["enum"]]
        return "(" + " | ".join(map(lark.literal, quoted)) + ")"
    if kind in ("integer", "number", "boolean", "null"):
        return lark.json(schema)
    if kind == "array":
        item = _gemma_value(lark, schema.get("items"))
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind == "object":
        inner = Tool("", schema, {})
        return gemma_arguments(lark, inner)
    return f"{lark.literal(_GEMMA_QUOTE)} {lark.until(_GEMMA_QUOTE)}"


def _list_entries(lark: Lark, tool: Tool, entries: Mapping[str, str], comma: str) -> str:
    """Entries with commas between them: the required ones, then any of the optional in their order."""
    required = [text for key, text in entries.items() if key in tool.required]
    optional = [text for key, text in entries.items() if key not in tool.required]
    between = lark.literal(comma)

    def follow(first: str, later: Sequence[str]) -> str:
        return " ".join([first, *(f"({between} {text})?" for text in later)])

    if required:
        return follow(f" {between} ".join(required), optional)
    starts = [follow(text, optional[n + 1 :]) for n, text in enumerate(optional)]
    return f"({' | '.join(starts)})?" if starts else ""
