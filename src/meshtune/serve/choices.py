"""The choices of a completion: what the engine is asked for each, and its text as it grows, token by token."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from meshtune.generate.request import GenerationRequest, Token
from meshtune.generate.text import Alignment, Detokenizer, Place, StopStrings
from meshtune.serve.models import Served
from meshtune.serve.schema import CompletionFields


class PlacedToken(NamedTuple):
    """A token with its log-probabilities and its place in the text."""

    token: Token
    place: Place


@dataclasses.dataclass(frozen=True)
class ChoiceDelta:
    """New text of choice number `index`, the number of tokens generated for it, why the choice ended (None: it has
    not), and the tokens of the text where log-probabilities are requested."""

    index: int
    text: str
    generated: int
    tokens: list[PlacedToken]
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class ChoiceRequest:
    """A request to the engine for choice number `index`, with the strings that end its text.

    `continued` writes the text as the prompt's continuation, else as a text that begins. Special tokens that are
    `visible` are part of it.
    """

    index: int
    request: GenerationRequest
    stop: tuple[str, ...]
    continued: bool
    visible: frozenset[int] = frozenset()


class Completion(Protocol):
    """One request of a client and its choices, as OpenAI's API writes them."""

    @property
    def request(self) -> CompletionFields: ...

    @property
    def served(self) -> Served: ...

    @property
    def choices(self) -> Sequence[ChoiceRequest]: ...

    @property
    def head(self) -> dict[str, Any]:
        """The fields of a response, or of a chunk of a stream, but its choices."""
        ...

    @property
    def scores_prompt(self) -> bool:
        """Whether `choice` computes log-probabilities of the prompt."""
        ...

    def choice(self, request: ChoiceRequest, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """A choice of a whole response."""
        ...

    def first_chunks(self) -> list[dict[str, Any]]:
        """The choices that a stream begins with, before any text."""
        ...

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The choices of a stream's chunks for new text."""
        ...


async def stream_choice(served: Served, choice: ChoiceRequest) -> AsyncGenerator[ChoiceDelta]:
    """The text of a choice as it grows; one that is not read to its end is cancelled."""
    request = choice.request
    if request.max_tokens == 0:
        yield ChoiceDelta(choice.index, "", 0, [], "length")
        return
    text = _ChoiceText(served, choice)
    async with aclosing(served.worker.stream(request)) as steps:
        async for step in steps:
            new = [token for token in step.tokens if token.id not in request.stop_ids]
            shown, reason = text.push(new), step.finish_reason
            if reason is not None and not text.stopped:
                shown += text.finish()
            if text.stopped:
                reason = "stop"
            if shown or new or reason is not None:
                tokens = text.take_tokens(ended=reason is not None and not text.stopped)
                yield ChoiceDelta(choice.index, shown, len(new), tokens, reason)
            if reason is not None:
                return


class _ChoiceText:
    """The text of a choice up to a stop string, and its tokens where log-probabilities are requested."""

    def __init__(self, served: Served, choice: ChoiceRequest):
        prompt = choice.request.prompt if choice.continued else ()
        self._decoder = Detokenizer(served.model.tokenizer, prompt, choice.visible)
        self._stop, self._shown = StopStrings(choice.stop), 0
        self._new: deque[Token] = deque()
        self._placed: deque[PlacedToken] = deque()
        self._alignment = None
        if choice.request.alternatives is not None:
            hidden = served.special_ids - choice.visible
            self._alignment = Alignment(self._decoder, served.token_bytes, hidden, choice.continued)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._stop.found

    def push(self, tokens: list[Token]) -> str:
        """The text that these tokens complete, and that is no beginning of a stop string."""
        if self._alignment is None:
            return self._stop.push(self._decoder.push([token.id for token in tokens]))
        self._new += tokens
        text = ""
        for token in tokens:
            part, places = self._alignment.push(token.id)
            self._place(places)
            text += part
        return self._show(self._stop.push(text))

    def finish(self) -> str:
        """The text that was held back, when no more tokens come."""
        text, places = (self._decoder.finish(), []) if self._alignment is None else self._alignment.finish()
        self._place(places)
        text = self._stop.push(text)
        return self._show(text + self._stop.finish())

    def take_tokens(self, ended: bool) -> list[PlacedToken]:
        """The tokens that begin in the text shown so far, each once; all of them where the text has `ended`."""
        tokens = []
        while self._placed and (ended or self._placed[0].place.offset < self._shown):
            tokens.append(self._placed.popleft())
        return tokens

    def _place(self, places: list[Place]) -> None:
        self._placed += [PlacedToken(self._new.popleft(), place) for place in places]

    def _show(self, text: str) -> str:
        self._shown += len(text)
        return text
