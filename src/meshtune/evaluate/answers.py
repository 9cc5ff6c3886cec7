"""Answers to many prompts through the engine's queue, each once it is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshtune.errors import UserError
from meshtune.generate.engine import Engine
from meshtune.generate.programs import STEPS
from meshtune.generate.request import Generation, GenerationRequest
from meshtune.generate.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 16  # prompts computed at once


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request with the strings that end its answer. `continued` writes the answer as the prompt's continuation, else
    as a separate text; `name` is that of its record."""

    request: GenerationRequest
    stop: tuple[str, ...] = ()
    continued: bool = False
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The text of an answer, its number of tokens, and why it ended: stop, or length."""

    text: str
    tokens: int
    finish_reason: str


class _Writing:
    """An answer under way."""

    def __init__(self, number: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase):
        self.number, self.prompt = number, prompt
        self._decoder = Detokenizer(tokenizer, prompt.request.prompt if prompt.continued else ())
        self._ends, self._text = StopStrings(prompt.stop), ""

    def push(self, ids: list[int]) -> bool:
        """Adds tokens; whether a stop string has ended the text."""
        self._text += self._ends.push(self._decoder.push(ids))
        return self._ends.found

    def answer(self, generation: Generation) -> Answer:
        """The answer, once no more tokens come."""
        self._text += self._ends.push(self._decoder.finish()) + self._ends.finish()
        reason = "stop" if self._ends.found else str(generation.finish_reason)
        return Answer(self._text, len(generation.tokens), reason)


def answers(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, rows: int = ROWS
) -> Iterator[tuple[int, Answer]]:
    """(number of the prompt, its answer) in the order in which they end; `rows` prompts are computed at once.

    Raises UserError naming the prompt where the model's logits are not finite.
    """
    if not prompts:
        return
    scheduler = engine.scheduler(rows=min(rows, len(prompts)))
    writing = {
        scheduler.submit(prompt.request): _Writing(number, prompt, tokenizer) for number, prompt in enumerate(prompts)
    }
    while writing:
        for progress in scheduler.step(STEPS):
            generation = progress.generation
            if generation not in writing:
                continue
            current = writing[generation]
            if generation.error is not None:
                raise UserError(generation.error.what, where=current.prompt.name or None, fix=generation.error.fix)
            if current.push([token.id for token in progress.tokens]):
                scheduler.cancel(generation)
            elif progress.finish_reason is None:
                continue
            del writing[generation]
            yield current.number, current.answer(generation)
