"""How families write tool calls: what begins and ends one, how it is read, and its grammar; a format is an entry of
FORMATS.

The model's own chat template decides which it is, for it shows the model how to write a call. Adding a format is an
entry of `FORMATS`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.calls.grammar import Lark
from meshtune.generate.text import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THINK = ("<think>", "</think>")
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments; `definition` is the tool as
    chat templates read it."""

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Arguments that every call has."""
        return frozenset(self.parameters.get("required") or ())


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Tools = Mapping[str, Tool]


def call_from_json(value: Any) -> ToolCall:
    """The call of an object with a name and arguments (or parameters). Raises ValueError."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call has a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return call_of(value["name"], arguments)


def call_of(name: str, arguments: Any) -> ToolCall:
    """A call of a name with an object of arguments. Raises ValueError where it is none."""
    if not name or not isinstance(arguments, Mapping):
        raise ValueError("a call has a name and an object of arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def new_id(length: int | None) -> str:
    """An id for a call; `length` letters and digits where the family has a length, else as OpenAI's."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(length))


def typed_argument(text: str, schema: Any) -> Any:
    """An argument that was written as bare text: a string where its schema has no other type, else JSON if it is."""
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if types == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


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


def json_arguments(lark: Lark, tool: Tool) -> str:
    """Arguments as a JSON object."""
    return lark.json(tool.parameters)


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    A call, or with DeepSeek's and others all of them, is between `opens` and `closes` ("": the beginning of a JSON
    text, and the end of the answer); `read` takes the text between them and the tools, and raises ValueError for a text
    that is no call. A grammar's text is `first`, calls of `head` (with the name in place of NAME), arguments and
    `tail`, joined by `between`, and `last`. `markers` are the tokens that a tokenizer may hold special and that must be
    read.
    """

    opens: str
    closes: str
    read: Callable[[str, Tools], list[ToolCall]]
    head: str
    tail: str = ""
    arguments: Callable[[Lark, Tool], str] = json_arguments
    first: str = ""
    between: str | None = "\n"
    last: str = ""
    markers: tuple[str, ...] = ()
    id_length: int | None = None

    def grammar(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """The rule of a grammar for at least one call of these tools."""
        calls = [
            " ".join(filter(None, [lark.literal(head), self.arguments(lark, tool), lark.literal(self.tail)]))
            for tool in tools
            for head in [self.head.replace("NAME", tool.name)]
        ]
        call = "(" + " | ".join(calls) + ")"
        if several and self.between is not None:
            call = f"{call} ({lark.literal(self.between)} {call})*"
        return " ".join(filter(None, [lark.literal(self.first), call, lark.literal(self.last)]))


HERMES = CallFormat(
    "<tool_call>", "</tool_call>", read_tagged,
    head='<tool_call>\n{"name": "NAME", "arguments": ', tail="}\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)  # fmt: skip
QWEN_XML = dataclasses.replace(
    HERMES,
    head="<tool_call>\n<function=NAME>\n",
    tail="</function>\n</tool_call>",
    arguments=tagged_arguments("<parameter=KEY>\n", "\n</parameter>\n"),
)
GLM = dataclasses.replace(
    HERMES,
    head="<tool_call>NAME\n",
    tail="</tool_call>",
    arguments=tagged_arguments("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    markers=(*HERMES.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX = CallFormat(
    "<minimax:tool_call>", "</minimax:tool_call>", read_invocations,
    head='<invoke name="NAME">\n', tail="</invoke>\n",
    arguments=tagged_arguments('<parameter name="KEY">', "</parameter>", "\n"),
    first="<minimax:tool_call>\n", between="", last="</minimax:tool_call>",
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)  # fmt: skip
MISTRAL = CallFormat(
    "[TOOL_CALLS]", "", read_list,
    head='{"name": "NAME", "arguments": ', tail="}",
    first="[TOOL_CALLS][", between=", ", last="]", markers=("[TOOL_CALLS]",), id_length=9,
)  # fmt: skip
MISTRAL_ARGS = dataclasses.replace(
    MISTRAL,
    read=read_named("[TOOL_CALLS]", "[ARGS]"),
    head="[TOOL_CALLS]NAME[ARGS]",
    tail="",
    first="",
    between="",
    last="",
    markers=("[TOOL_CALLS]", "[ARGS]"),
)
LLAMA = CallFormat(
    "", "", read_list,
    head='{"name": "NAME", "parameters": ', tail="}", between=None, markers=("<|python_tag|>",),
)  # fmt: skip
PLAIN = dataclasses.replace(LLAMA, head='{"name": "NAME", "arguments": ', between="\n", markers=())
DEEPSEEK = CallFormat(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", read_deepseek,
    head="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", tail="<｜tool▁call▁end｜>",
    first="<｜tool▁calls▁begin｜>", between="", last="<｜tool▁calls▁end｜>",
    markers=tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
)  # fmt: skip
DEEPSEEK_R1 = dataclasses.replace(
    DEEPSEEK,
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n",
)
LFM2 = CallFormat(
    "<|tool_call_start|>", "<|tool_call_end|>", read_pythonic,
    head="NAME(", tail=")", arguments=keyword_arguments,
    first="<|tool_call_start|>[", between=", ", last="]<|tool_call_end|>",
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
)  # fmt: skip
GEMMA = CallFormat(
    "<|tool_call>", "<tool_call|>", read_gemma,
    head="<|tool_call>call:NAME", tail="<tool_call|>", arguments=gemma_arguments, between="",
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
)  # fmt: skip
HARMONY = CallFormat(
    "", "", read_list,
    head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", between=None,
    markers=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
)  # fmt: skip

# What a chat template must write, the most telling first.
FORMATS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "to=functions"), HARMONY),
    (("<minimax:tool_call>",), MINIMAX),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_R1),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_call>", "<tool_call|>"), GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<tool_call>", "<function="), QWEN_XML),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>",), HERMES),
    (('"parameters": ',), LLAMA),
    (('"name": ', '"arguments": '), PLAIN),
)


@functools.lru_cache(maxsize=32)
def call_format(template: str) -> CallFormat | None:
    """How the models of a chat template write calls; None where it shows none."""
    return next((form for telling, form in FORMATS if all(text in template for text in telling)), None)


@dataclasses.dataclass(frozen=True)
class AnswerFormat:
    """How a model answers a prompt. `calls` is how it writes calls (None: it writes none), and `think` the tags of
    reasoning; `thinks`: the prompt ends within the answer's reasoning."""

    calls: CallFormat | None
    think: tuple[str, str] | None
    thinks: bool

    @classmethod
    def of_prompt(cls, template: str, prompt: str) -> AnswerFormat:
        """The format of answers to a prompt that `template` rendered."""
        opens, closes = THINK
        end = prompt.rstrip()
        reasons = (closes in template or end.endswith(opens)) and not end.endswith(closes)
        return cls(call_format(template), THINK if reasons else None, reasons and end.endswith(opens))

    def visible_ids(self, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
        """Special tokens that the reader must see in an answer."""
        markers = {*(self.think or ()), *(self.calls.markers if self.calls is not None else ())}
        return frozenset(
            id_ for id_ in special_ids(tokenizer) if tokenizer.added_tokens_decoder[id_].content in markers
        )
