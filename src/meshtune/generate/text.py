"""Text that grows token by token: whole characters only, right spaces, and stop strings that never show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshtune.errors import UserError
from meshtune.generate.config import Sampling
from meshtune.generate.engine import Engine
from meshtune.generate.programs import STEPS
from meshtune.generate.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "�"  # what decoding gives for the first bytes of a character whose last are yet to come
CONTEXT = 8  # tokens of the prompt that decide how the first new token is written


class Detokenizer:
    """Turns new token ids into text, special tokens left out.

    A token is decoded together with the ones before it, because what it stands for depends on them: sentencepiece-like
    tokenizers drop the space of a text's first word, and a character may be spread over several tokens. With `before`
    the text continues those tokens; without, it begins anew. Special tokens that are `visible` are written too.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = (), visible: frozenset[int] = frozenset()
    ):
        self._tokenizer = tokenizer
        self._hidden = special_ids(tokenizer) - visible if visible else None
        # Not from the middle of a character, which would spoil those that follow it.
        width = CONTEXT
        while width < len(before) and UNFINISHED in self._decode(list(before[-width:])):
            width *= 2
        self._ids = list(before[-width:])
        self._start, self._shown = 0, len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._ids.extend(ids)
        return self._more(flush=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return self._more(flush=True)

    def _more(self, flush: bool) -> str:
        shown = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(shown) or (text.endswith(UNFINISHED) and not flush):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [id_ for id_ in ids if id_ not in self._hidden]
        text = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of all tokens that are left out of decoded text."""
    return frozenset(id_ for id_, added in tokenizer.added_tokens_decoder.items() if added.special)


class StopStrings:
    """Ends a text before the first of some strings; holds back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]):
        if "" in strings:
            raise UserError("a stop string is empty", where="stop", fix="leave it out")
        self._strings, self._held, self.found = tuple(strings), "", False

    def push(self, text: str) -> str:
        """The text that is safe to show."""
        if self.found:
            return ""
        text = self._held + text
        at = min((i for i in map(text.find, self._strings) if i >= 0), default=None)
        if at is not None:
            self.found, self._held = True, ""
            return text[:at]
        keep = max((overlap(text, string) for string in self._strings), default=0)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that `string` begins with, `string` itself aside."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if string.startswith(text[-n:])), 0)


def pieces(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_tokens: int | None,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] | None = None,
    continued: bool = True,
    steps: int = STEPS,
    scheduler: Scheduler | None = None,
) -> Iterator[list[str]]:
    """Generates, and yields each prompt's new text piece by piece; joined, a prompt's pieces are its whole answer.

    `continued` writes the answer as the prompt's continuation, else as a text of its own (a turn of a chat).
    Raises UserError as Engine.run and StopStrings do, before anything is computed.
    """
    run = engine.run(prompts, sampling, max_tokens=max_tokens, stop_ids=stop_ids, steps=steps, scheduler=scheduler)
    rows = [(Detokenizer(tokenizer, prompt if continued else ()), StopStrings(stop)) for prompt in prompts]

    def texts() -> Iterator[list[str]]:
        for piece in run:
            shown = [ends.push(decoder.push(ids)) for ids, (decoder, ends) in zip(piece, rows, strict=True)]
            for number, (_, ends) in enumerate(rows):
                if ends.found:
                    run.stop(number)
            yield shown
        yield [ends.push(decoder.finish()) + ends.finish() for decoder, ends in rows]

    return texts()
