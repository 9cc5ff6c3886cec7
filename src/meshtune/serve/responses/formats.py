"""How families write tool calls: what begins and ends one, how it is read, and what a grammar for it is.

The model's own chat template decides which it is, for it shows the model how to write a call. Adding a format is an
entry of `FORMATS`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from meshtune.serve.responses.bare_calls import gemma_arguments, keyword_arguments, read_gemma, read_pythonic
from meshtune.serve.responses.call import Tool, ToolCall, Tools
from meshtune.serve.responses.json_calls import read_deepseek, read_list, read_named
from meshtune.serve.responses.lark import Lark
from meshtune.serve.responses.tagged_calls import read_invocations, read_tagged, tagged_arguments


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
