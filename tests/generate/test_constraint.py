"""The engine keeps to a grammar, whoever wrote it; this one is a fixed row of tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.generate.request import Sampling, mask_words
from meshtune.generate.scheduler import packed_masks

VOCAB = 512


@dataclasses.dataclass
class Fixed:
    """A grammar, and its constraint, that allows these tokens and no others; one that is `broken` fails after two."""

    tokens: tuple[int, ...]
    broken: bool = False
    position: int = 0

    def start(self) -> Fixed:
        return dataclasses.replace(self)

    def mask(self) -> np.ndarray:
        bits = np.zeros(mask_words(VOCAB) * 32, np.uint8)
        bits[self.tokens[self.position]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token == self.tokens[self.position]
        self.position += 1
        if self.broken and self.position == 2:
            raise UserError("the grammar is broken")

    @property
    def finished(self) -> bool:
        return self.position == len(self.tokens)


@pytest.fixture(scope="module")
def engine(stories260k):
    return load(stories260k, dtype="float32").engine


PROMPT = [1, 403, 407]
TOKENS = (511, 300, 31, 32, 7)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, top_k=3, top_p=0.5, min_p=0.3, seed=4)])
def test_rows_keep_to_their_grammars_and_others_are_as_alone(engine, sampling):
    alone = engine.generate([PROMPT], sampling, max_tokens=9)[0]
    scheduler = engine.scheduler(rows=4)
    grammar = Fixed(TOKENS)
    first, second = (
        scheduler.submit(engine.request(PROMPT, sampling, max_tokens=9, grammar=grammar, alternatives=1))
        for _ in range(2)
    )
    free = scheduler.submit(engine.request(PROMPT, sampling, max_tokens=9))
    broken = scheduler.submit(engine.request(PROMPT, sampling, max_tokens=9, grammar=Fixed(TOKENS, broken=True)))
    short = scheduler.submit(engine.request(PROMPT, sampling, max_tokens=3, grammar=grammar))
    while not scheduler.idle:
        scheduler.step()
    assert first.ids == second.ids == list(TOKENS)
    assert first.finish_reason == second.finish_reason == "stop"
    assert free.ids == alone
    assert broken.finish_reason == "error"
    assert broken.error is not None
    assert "broken" in broken.error.what
    assert (short.ids, short.finish_reason) == (list(TOKENS[:3]), "length")
    # Log-probabilities are the model's own, so what it would have said stays visible.
    assert all(
        token.log_probability is not None and token.log_probability <= token.likeliest[0][1] for token in first.tokens
    )


def test_a_row_without_a_grammar_may_have_all_tokens():
    masks = packed_masks([None, Fixed((33,))], VOCAB)
    assert masks.tolist() == [[2**32 - 1] * 16, [0, 2, *[0] * 14]]
