"""One answer of a model as a client reads it: text that grows, its log-probabilities, and why it ended."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from meshtune.generate.request import GenerationRequest, Token
from meshtune.generate.text import Alignment, Detokenizer, Place, StopStrings
from meshtune.serve.models import Served


class PlacedToken(NamedTuple):
    """A token with its log-probabilities and its place in the text."""

    token: Token
    place: Place


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new of an answer: text, the number of tokens, why it ended (None: it goes on), and the tokens of the text
    where log-probabilities are asked for."""

    choice: int
    text: str
    generated: int
    tokens: list[PlacedToken]
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt as the engine takes it, with the strings that end its answer.

    `continued` writes the answer as the prompt's continuation, else as a text of its own. Special tokens that are
    `visible` are part of its text.
    """

    choice: int
    request: GenerationRequest
    stop: tuple[str, ...]
    continued: bool
    visible: frozenset[int] = frozenset()


async def answer(served: Served, question: Question) -> AsyncGenerator[Piece]:
    """The answer to a question, piece by piece; one that is not read to its end is cancelled."""
    request = question.request
    if request.max_tokens == 0:
        yield Piece(question.choice, "", 0, [], "length")
        return
    text_of = _Text(served, question)
    async with aclosing(served.worker.stream(request)) as steps:
        async for step in steps:
            new = [token for token in step.tokens if token.id not in request.stop_ids]
            text = text_of.push(new)
            if text_of.stopped:
                yield Piece(question.choice, text, len(new), text_of.tokens(), "stop")
                return
            if step.finish_reason is not None:
                text += text_of.finish()
                reason = "stop" if text_of.stopped else step.finish_reason
                yield Piece(question.choice, text, len(new), text_of.tokens(ended=not text_of.stopped), reason)
            elif text or new:
                yield Piece(question.choice, text, len(new), text_of.tokens())


class _Text:
    """The text of an answer up to a stop string, and its tokens where log-probabilities are asked for."""

    def __init__(self, served: Served, question: Question):
        prompt = question.request.prompt if question.continued else ()
        self._decoder = Detokenizer(served.model.tokenizer, prompt, question.visible)
        self._ends, self._shown = StopStrings(question.stop), 0
        self._new: deque[Token] = deque()
        self._placed: deque[PlacedToken] = deque()
        self._alignment = None
        if question.request.alternatives is not None:
            hidden = served.special_ids - question.visible
            self._alignment = Alignment(self._decoder, served.token_bytes, hidden, question.continued)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._ends.found

    def push(self, tokens: list[Token]) -> str:
        """The text that these tokens complete, and that is no beginning of a stop string."""
        if self._alignment is None:
            return self._ends.push(self._decoder.push([token.id for token in tokens]))
        self._new += tokens
        text = ""
        for token in tokens:
            part, places = self._alignment.push(token.id)
            self._place(places)
            text += part
        return self._show(self._ends.push(text))

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        text, places = (self._decoder.finish(), []) if self._alignment is None else self._alignment.finish()
        self._place(places)
        text = self._ends.push(text)
        return self._show(text + self._ends.finish())

    def tokens(self, ended: bool = False) -> list[PlacedToken]:
        """The tokens that begin in what was shown, each once; all of them where the text has `ended`."""
        tokens = []
        while self._placed and (ended or self._placed[0].place.offset < self._shown):
            tokens.append(self._placed.popleft())
        return tokens

    def _place(self, places: list[Place]) -> None:
        self._placed += [PlacedToken(self._new.popleft(), place) for place in places]

    def _show(self, text: str) -> str:
        self._shown += len(text)
        return text
