"""Renders plain messages with the compiled template that transformers' `apply_chat_template` uses, without its copies.

`apply_chat_template` copies and normalises every message on every call, which takes longer than most templates. For
messages whose keys are role and content and whose values are text there is nothing to normalise: the template gets the
same variables in the same environment. Other messages take the public way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2.nodes
from transformers.utils import chat_template_utils

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PLAIN = {"role", "content"}


def is_plain(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether there are messages, and all have a role and a content of exact type str and nothing else."""
    return bool(messages) and all(
        type(message) is dict and message.keys() == _PLAIN and type(message["role"]) is type(message["content"]) is str
        for message in messages
    )


def variables_of(template: str) -> frozenset[str]:
    """The names of variables that a template reads. Raises as jinja2 does for text that is no template."""
    environment = chat_template_utils._compile_jinja_template(template).environment
    names = environment.parse(template).find_all(jinja2.nodes.Name)
    return frozenset(name.name for name in names if name.ctx == "load")


class CompiledTemplate:
    """A chat template compiled once. `variables` are those that the tokenizer gives to every template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str):
        self._template = chat_template_utils._compile_jinja_template(text)
        self._variables = dict(tokenizer.special_tokens_map)

    def render(self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool) -> str:
        """The text of plain messages. Raises as templates do."""
        return self._template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self._variables,
        )
