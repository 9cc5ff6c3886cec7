"""Renders messages as transformers' `apply_chat_template` does, within bounds, and without its copies of plain ones.

`apply_chat_template` copies and normalises every message on every call, which takes longer than most templates. For
messages whose keys are role and content and whose values are text there is nothing to normalise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2.nodes
from transformers.utils import chat_template_utils

from meshtune.data.template_environment import bounded_environment, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PLAIN = {"role", "content"}


def is_plain(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether there are messages, and all have a role and a content of exact type str and nothing else."""
    return bool(messages) and all(
        type(message) is dict and message.keys() == _PLAIN and type(message["role"]) is type(message["content"]) is str
        for message in messages
    )


class CompiledTemplate:
    """A chat template compiled once; the tokenizer gives its special tokens to every template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str):
        self.text, self._template = text, _compile(text)
        self._variables = dict(tokenizer.special_tokens_map)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names of variables that the template reads."""
        names = bounded_environment().parse(self.text).find_all(jinja2.nodes.Name)
        return frozenset(name.name for name in names if name.ctx == "load")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        generation_prompt: bool = False,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """The text of some messages. Raises as templates do, and TemplateLimitError."""
        plain = not tools and not options and is_plain(messages)
        variables: dict[str, Any] = {
            "messages": [dict(message) for message in messages] if plain else _normalise(messages),
            "tools": _plain(list(tools)) if tools else None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self._variables,
        }
        return render(self._template, variables | _plain(dict(options)) if options else variables)


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> Any:
    return bounded_environment().from_string(text)


def _plain(value: Any) -> Any:
    """A value made of JSON's types only, as the installed transformers hands it to templates."""
    rebuild = getattr(chat_template_utils, "_plain_template_data", None)
    return value if rebuild is None else rebuild(value)


def _normalise(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Messages as the installed transformers hands them to templates: newer versions give reasoning under the names
    that other templates read it by."""
    plain = _plain([dict(message) for message in messages])
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    return plain if alias is None else alias(plain)
