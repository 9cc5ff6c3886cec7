"""A conversation that remembers: history, system prompt, streaming, and what happens when the context is full."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from meshtune.errors import UserError
from meshtune.generate.engine import DEFAULT_TOKENS
from meshtune.generate.pictures import LoadedPicture, TokenPrompt, load_picture, text_only
from meshtune.generate.request import Sampling
from meshtune.generate.text import chat_prompt, pieces, turn_end

if TYPE_CHECKING:
    from meshtune.generate.api import Model

Overflow = Literal["error", "drop_oldest"]


def _shown(message: dict[str, Any]) -> str:
    """The text of a message, with a mark for each picture."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else "[picture]" for part in content)


def _say(notice: str) -> None:
    print(notice, file=sys.stderr)


class ChatSession:
    """A chat with one model. `messages` is the history that the next answer sees, the system prompt included.

    When history, new message and max_tokens are longer than the context, `overflow` decides: "error" raises UserError
    and leaves the history as it was, "drop_oldest" forgets the oldest turns and says so through `notify` (standard
    error by default). Raises UserError at once for a tokenizer that has no chat template.
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        overflow: Overflow = "error",
        notify: Callable[[str], None] = _say,
    ):
        if overflow not in ("error", "drop_oldest"):
            raise UserError(f"overflow = {overflow!r} is unknown", fix="give 'error' or 'drop_oldest'")
        self._model, self._system = model, system
        self.sampling, self.max_tokens, self.stop = sampling or Sampling(), max_tokens, tuple(stop)
        self.overflow, self._notify = overflow, notify
        self._turn_ids, self._turn_strings = turn_end(model.tokenizer)
        self._scheduler = model.engine.scheduler(rows=1)  # it keeps the text it has read
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def send(self, text: str, pictures: Sequence[object] = ()) -> str:
        """The answer to `text`, after these pictures (paths, bytes or PIL images); all become history."""
        return "".join(self.stream(text, pictures))

    def stream(self, text: str, pictures: Sequence[object] = ()) -> Iterator[str]:
        """Generates the answer piece by piece. The pieces before an interruption stay in the history.

        Raises UserError, before the first piece, for empty words, for a picture that cannot be read, and for a context
        that is full.
        """
        if not text.strip():
            raise UserError("the message is empty", fix="write something")
        content: Any = text
        if pictures:
            content = [{"type": "image", "image": self.load(picture)} for picture in pictures]
            content.append({"type": "text", "text": text})
        messages, prompt = self._fitting([*self.messages, {"role": "user", "content": content}])
        generated = pieces(
            self._model.engine,
            self._model.tokenizer,
            [prompt],
            self.sampling,
            max_tokens=self.max_tokens,
            stop=(*self.stop, *self._turn_strings),
            stop_ids=self._model.engine.stop_ids | self._turn_ids,
            continued=False,
            steps=self._model.stream_steps,
            scheduler=self._scheduler,
        )
        return self._answer(messages, generated)

    def _repr_html_(self) -> str:
        """The conversation as notebooks show it."""
        style = "style='text-align: left; vertical-align: top; white-space: pre-wrap'"
        rows = (
            f"<tr><th {style}>{html.escape(message['role'])}</th><td {style}>{html.escape(_shown(message))}</td></tr>"
            for message in self.messages
        )
        return f"<table>{''.join(rows)}</table>"

    def load(self, picture: object) -> LoadedPicture:
        """Reads a picture, once for all turns. Raises UserError for one that cannot be read, and for a model that reads
        text only."""
        if (reader := self._model.picture_reader) is None:
            raise text_only()
        return load_picture(reader, picture, "picture")

    def _answer(self, messages: list[dict[str, Any]], generated: Iterator[list[str]]) -> Iterator[str]:
        answer = ""
        try:
            for (text,) in generated:
                if text:
                    answer += text
                    yield text
        finally:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _fitting(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], TokenPrompt]:
        """The messages that leave room for an answer, and their prompt."""
        context, tokenizer = self._model.engine.context, self._model.tokenizer
        reader = self._model.picture_reader
        reserved = self.max_tokens if self.max_tokens is not None else min(DEFAULT_TOKENS, context // 4)
        first = 1 if messages[0]["role"] == "system" else 0
        remaining, prompt = messages, chat_prompt(tokenizer, messages, reader)
        while len(prompt.ids) + reserved > context and self.overflow == "drop_oldest" and len(remaining) - first > 1:
            later = next((i for i in range(first + 1, len(remaining)) if remaining[i]["role"] == "user"), None)
            if later is None:
                break
            remaining = remaining[:first] + remaining[later:]
            prompt = chat_prompt(tokenizer, remaining, reader)
        if len(prompt.ids) + reserved > context:
            subject = "the message" if len(remaining) - first == 1 else "the conversation"
            fix = "send less at once, or give a smaller max_tokens"
            if subject == "the conversation":
                fix = "begin anew (reset), give a smaller max_tokens, or overflow='drop_oldest'"
            needed = f"{subject} of {len(prompt.ids)} tokens and an answer of {reserved}"
            raise UserError(f"{needed} are more than the context of {context}", fix=fix)
        if dropped := len(messages) - len(remaining):
            self._notify(f"The context of {context} tokens is full: the oldest {dropped} messages were forgotten.")
        return remaining, prompt
