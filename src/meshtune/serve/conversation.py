"""A conversation as its model is asked to answer it: the prompt, what the answer must be like, and how it is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.generate.prompts import chat_text, encoded_chat
from meshtune.generate.text import special_ids
from meshtune.serve.errors import ApiError
from meshtune.serve.grammar import LLGrammar, check_size
from meshtune.serve.models import Served
from meshtune.serve.responses.call import Tool
from meshtune.serve.responses.formats import HARMONY, CallFormat, call_format
from meshtune.serve.responses.lark import Lark
from meshtune.serve.responses.reader import THINK, HarmonyReader, Reader, TaggedReader, visible_markers
from meshtune.serve.schema import ChatRequest
from meshtune.serve.tools import demanded, named_tools

# What the function that renders a template takes itself.
_RESERVED = frozenset({"messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "documents"})
_NO_EFFORT = ("none", "minimal")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation that was rendered. `tools` may be called, and one of `demanded` must be; `thinks`: the prompt ends
    within the answer's reasoning."""

    request: ChatRequest
    served: Served
    ids: list[int]
    tools: Mapping[str, Tool]
    demanded: Sequence[Tool]
    form: CallFormat | None
    think: tuple[str, str] | None
    thinks: bool

    @property
    def plain(self) -> bool:
        """Whether the answer is content and nothing else."""
        return self.think is None and self.form is None

    @property
    def visible(self) -> frozenset[int]:
        """Special tokens that the answer's reader must see."""
        if self.plain:
            return frozenset()
        tokenizer, markers = self.served.model.tokenizer, set(visible_markers(self.think, self.form))
        return frozenset(
            id_ for id_ in special_ids(tokenizer) if tokenizer.added_tokens_decoder[id_].content in markers
        )

    def reader(self) -> Reader:
        """Reads one answer."""
        if self.form is HARMONY:
            return HarmonyReader(self.tools)
        return TaggedReader(self.think, self.thinks, self.form if self.tools else None, self.tools)

    def grammar(self) -> LLGrammar | None:
        """What the answer must be like; None where it is free. Raises UserError for a schema that cannot be had."""
        form = self.request.response_format
        schema = None if form is None else form.schema_of_answer
        if schema is None and not self.demanded:
            return None
        where = "tools" if self.demanded else "response_format"
        check_size([tool.parameters for tool in self.demanded] or [schema or {}], where)
        grammars = self.served.chat_grammars
        if schema is not None and self.plain:
            return grammars.json(schema, where)
        lark = Lark(grammars.special)
        if self.demanded:
            assert self.form is not None
            several = len(self.demanded) == len(self.tools) and self.request.parallel_tool_calls is not False
            body = self.form.grammar(lark, self.demanded, several and self.request.tool_choice == "required")
        else:
            assert schema is not None
            head = lark.literal("<|channel|>final<|message|>") if self.form is HARMONY else ""
            body = f"{head} {lark.json(schema)}"
        return grammars.lark(lark.whole(f"{self._reasoning(lark)} {body}"), where)

    def _reasoning(self, lark: Lark) -> str:
        """What may come before the part that a grammar is about."""
        if self.form is HARMONY:
            start = f"{lark.literal('<|channel|>analysis<|message|>')} {lark.until('<|end|>')}"
            return f"({start} {lark.literal('<|start|>assistant')})?"
        if self.think is None:
            return ""
        text = f'{lark.until(self.think[1])} ("\\n" "\\n"?)?'
        return text if self.thinks else f"({lark.literal(self.think[0])} {text})?"


def prepared(request: ChatRequest, served: Served) -> Conversation:
    """Renders a request's conversation by the model's chat template. Raises ApiError and UserError for what it cannot
    have: tools or options that the template does not know, messages that it refuses."""
    tokenizer = served.model.tokenizer
    tools = named_tools(request.tools or [])
    demand = demanded(request.tool_choice, tools)
    if request.tool_choice == "none":
        tools = {}
    template = str(tokenizer.get_chat_template(None, tools=[{}] if tools else None)) if tokenizer.chat_template else ""
    form = call_format(template)
    messages = [message.rendered(f"messages[{n}]") for n, message in enumerate(request.messages)]
    options = _options(request, template)
    text = _rendered(served, messages, tools, options)
    if tools:
        without = _rendered(served, messages, {}, options)
        if text == without or any(name not in text for name in tools):
            raise ApiError(
                400,
                "the chat template of this model does not show it the tools, so it cannot call them; a model may be "
                "served with another template that does (--chat-template chatml)",
                param="tools",
            )
        if form is None:
            raise ApiError(400, "how this model's chat template writes calls of tools is not known", param="tools")
    served.check_text(text, "messages")
    think, thinks = _thinking(template, text)
    if form is not HARMONY and not tools:
        form = None
    return Conversation(request, served, encoded_chat(tokenizer, text), tools, demand, form, think, thinks)


def _rendered(
    served: Served, messages: list[dict[str, Any]], tools: Mapping[str, Tool], options: Mapping[str, Any]
) -> str:
    definitions = [tool.definition for tool in tools.values()]
    return chat_text(served.model.tokenizer, messages, definitions, options)


def _options(request: ChatRequest, template: str) -> dict[str, Any]:
    """Variables of the template. Raises ApiError for one that it does not read."""
    options = dict(request.chat_template_kwargs or {})
    for name in options:
        if name in _RESERVED or len(name) > 100 or not re.search(rf"\b{re.escape(name)}\b", template):
            message = f"the chat template of this model has no option '{name[:100]}'"
            raise ApiError(400, message, param=f"chat_template_kwargs.{name[:100]}")
    if (effort := request.reasoning_effort) is not None:
        switch = next((name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template)), None)
        if re.search(r"\breasoning_effort\b", template):
            options.setdefault("reasoning_effort", effort)
        elif switch is not None:
            options.setdefault(switch, effort not in _NO_EFFORT)
        else:
            raise ApiError(400, "the chat template of this model has no reasoning", param="reasoning_effort")
    return options


def _thinking(template: str, text: str) -> tuple[tuple[str, str] | None, bool]:
    """The tags of reasoning (None: the answer has none), and whether the prompt has opened it."""
    opens, closes = THINK
    if closes not in template and not text.rstrip().endswith(opens):
        return None, False
    if text.rstrip().endswith(closes):
        return None, False
    return THINK, text.rstrip().endswith(opens)
