"""One answer of a model as a client reads it: text that grows, its log-probabilities, and why it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from meshtune.generate.request import Request, Token
from meshtune.generate.text import Detokenizer, StopStrings
from meshtune.serve.models import Served


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new of an answer: text, tokens with their log-probabilities, and why it ended (None: it goes on)."""

    choice: int
    text: str
    tokens: list[Token]
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt as the engine takes it, with the strings that end its answer.

    `continued` writes the answer as the prompt's continuation, else as a text of its own. Special tokens that are
    `visible` are part of its text.
    """

    choice: int
    request: Request
    stop: tuple[str, ...]
    continued: bool
    visible: frozenset[int] = frozenset()


async def answer(served: Served, question: Question) -> AsyncGenerator[Piece]:
    """The answer to a question, piece by piece; one that is not read to its end is cancelled."""
    prompt, stop_ids = question.request.prompt, question.request.stop_ids
    decoder = Detokenizer(served.model.tokenizer, prompt if question.continued else (), question.visible)
    unread = question.visible & stop_ids
    ends = StopStrings(question.stop)
    async with aclosing(served.worker.stream(question.request)) as steps:
        async for step in steps:
            text = ends.push(decoder.push([token.id for token in step.tokens if token.id not in unread]))
            said = [token for token in step.tokens if token.id not in stop_ids]
            if ends.found:
                yield Piece(question.choice, text, said, "stop")
                return
            if step.finish_reason is not None:
                rest = ends.push(decoder.finish())
                rest += ends.finish()
                reason = "stop" if ends.found else step.finish_reason
                yield Piece(question.choice, text + rest, said, reason)
            elif text or said:
                yield Piece(question.choice, text, said)
