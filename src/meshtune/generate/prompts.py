"""From a person's words to token ids, and when to stop: text to continue, or a conversation to answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshtune.data.chat import ChatTemplate, template_error
from meshtune.errors import UserError, nearest
from meshtune.runs.sources import Source
from meshtune.weights.ends import read_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "user", "assistant", "tool")
ChatMessage = Mapping[str, object]


def continuation_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a text to continue, with the special tokens the tokenizer begins a text with.

    Raises UserError if there are none.
    """
    ids: list[int] = tokenizer(text)["input_ids"]  # pyright: ignore[reportAssignmentType]
    # Some tokenizers end every text with their end token; a text that has ended is not continued.
    while text and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    if not ids:
        raise UserError("the prompt is empty", fix="give some text to continue")
    return ids


def chat_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[ChatMessage]) -> list[int]:
    """The ids of a conversation, rendered by the chat template and ready for the assistant's answer.

    Raises UserError for a tokenizer without a chat template, messages that are none, and what the template refuses.
    """
    return encoded_chat(tokenizer, chat_text(tokenizer, messages))


def chat_text(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, object]] = (),
    options: Mapping[str, object] | None = None,
) -> str:
    """A conversation with `tools` as its chat template renders it, ready for the assistant's answer; `options` are
    variables of the template. Raises UserError as `chat_ids` does."""
    chat = chat_template(tokenizer)
    _check(messages)
    try:
        return chat.render(chat.adapt(messages), tools, generation_prompt=True, options=options)
    except chat.failures as problem:
        error = template_error(problem, where=str(tokenizer.name_or_path))
        fix = "change the conversation, or give another chat_template"
        raise UserError(error.what, where=error.where, fix=fix) from problem


def encoded_chat(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a conversation that was rendered. Raises UserError if there are none."""
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    if not ids:
        raise UserError("the chat template renders this conversation to nothing", where=str(tokenizer.name_or_path))
    return ids


def chat_template(tokenizer: PreTrainedTokenizerFast) -> ChatTemplate:
    """The tokenizer's chat template. Raises UserError if it has none."""
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template, so this model cannot chat",
            where=str(tokenizer.name_or_path),
            fix="use generate with plain text (`meshtune generate`, Model.generate('...')), or give a chat_template: "
            "'plain' suits any base model",
        )
    return _measured_once(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def _measured_once(tokenizer: PreTrainedTokenizerFast, template: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def turn_end(tokenizer: PreTrainedTokenizerFast) -> tuple[frozenset[int], tuple[str, ...]]:
    """(token ids, strings) that end an assistant's turn in the chat template."""
    end = chat_template(tokenizer).end_of_turn
    if end.token is not None:
        return frozenset({end.token}), ()
    return frozenset(), ((end.head.strip(),) if end.head.strip() else ())


def text_end(source: Source, tokenizer: PreTrainedTokenizerFast | None) -> frozenset[int]:
    """Ids that end any text: those that the files of the base and of the adapter name, and the tokenizer's own."""
    ids = frozenset(read_ends(source.base, source.adapter))
    return ids if tokenizer is None else ids | tokenizer_end(tokenizer)


def tokenizer_end(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The id of the tokenizer's end token, if it has one."""
    end = tokenizer.eos_token_id
    return frozenset({end}) if isinstance(end, int) else frozenset()


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise UserError(
            "the conversation is empty", fix="give at least one message: {'role': 'user', 'content': '...'}"
        )
    for number, message in enumerate(messages):
        where = f"message {number}"
        role = message.get("role")
        if role not in ROLES:
            hint = nearest(str(role), ROLES)
            raise UserError(f"role {role!r} is unknown", where=where, fix=f"{hint}give one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UserError("a message needs its words as a string", where=f"{where}, field content")
    if messages[-1]["role"] == "assistant":
        raise UserError(
            "the conversation ends with the assistant's words, so there is nothing to answer",
            where=f"message {len(messages) - 1}",
            fix="end with a message of the user",
        )
