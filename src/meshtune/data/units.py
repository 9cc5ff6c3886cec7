"""Documents that are learned from two by two: a chosen and a rejected answer, or an example and its companion.

Document 2i and 2i + 1 of a store are unit i; in a packed row they are neighbouring segments. What is known of units,
beside their tokens, are further arrays of a batch (objectives.score.Batch says which).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from meshtune.data.conversation import Labelled, Pair
from meshtune.data.store import Store
from meshtune.data.tokens import Example, Tokenize


@dataclasses.dataclass(frozen=True)
class Units:
    """What a batch of units holds beside tokens.

    `reference` float32 [documents] are log-probabilities of a reference model. `nll` asks for the cross-entropy of
    first documents: of their answers, or of all their tokens; its weights add up to the number of units, in an update
    or, with `nll_share` (units per token of the whole store), in all updates together.
    """

    reference: np.ndarray | None = None
    nll: Literal["answer", "all"] | None = None
    nll_share: float | None = None

    def arrays(
        self, store: Store, members: Sequence[np.ndarray], most: int, tokens: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The arrays of rows that hold the units `members`: [rows, most], [rows, 2 * most] or, nll, [rows, T]."""
        rows = len(members)
        made = {name: np.zeros((rows, most), np.float32) for name in ("units", "values")}
        if self.reference is not None:
            made["reference"] = np.zeros((rows, 2 * most), np.float32)
        for row, held in enumerate(members):
            made["units"][row, : len(held)] = 1.0
            made["values"][row, : len(held)] = store.values[2 * held]
            if self.reference is not None:
                made["reference"][row, : 2 * len(held)] = self.reference.reshape(-1, 2)[held].ravel()
        if self.nll is not None:
            first = tokens["segment_ids"] % 2 == 1
            counted = first if self.nll == "all" else first & (tokens["weights"] > 0)
            share = self.nll_share or float(made["units"].sum()) / max(1, int(counted.sum()))
            made["nll"] = np.where(counted, np.float32(share), np.float32(0.0))
        return made


def nll_share(store: Store, nll: Literal["answer", "all"] | None) -> float | None:
    """Units per token that `nll` counts, over a whole store."""
    if nll is None:
        return None
    tokens = 0
    for document in range(0, len(store), 2):
        start, end = store.offsets[document] + 1, store.offsets[document + 1]
        tokens += int(end - start) if nll == "all" else int(np.count_nonzero(store.weights[start:end]))
    return len(store) / 2 / max(1, tokens)


def tokenised_pairs(tokenize: Tokenize, pairs: Iterable[Pair], *, scored: bool = False) -> Iterator[Example]:
    """Two examples a pair, the chosen answer first; a pair of which one side has nothing to learn is left out.

    With `scored` only the place after an answer's last token has a weight: there its score is read.
    """
    waiting: list[Pair] = []

    def sides():
        for pair in pairs:
            waiting.append(pair)
            yield pair.chosen
            yield pair.rejected

    found = tokenize.each(sides())
    for chosen in found:
        rejected, pair = next(found), waiting.pop(0)
        if chosen is None or rejected is None or np.array_equal(chosen.ids, rejected.ids):
            _uncount(tokenize, chosen, rejected)
            continue
        for side in (chosen, rejected):
            made = dataclasses.replace(side, value=pair.margin)
            yield _read_at_the_end(made) if scored else made


def tokenised_labelled(tokenize: Tokenize, samples: Iterable[Labelled]) -> Iterator[Example]:
    """Two examples a labelled answer: it, and its prompt with the answer of the example before (the first one's is the
    last of its window): what the KL baseline of KTO is estimated from (https://arxiv.org/abs/2402.01306)."""
    labels: list[bool] = []

    def documents():
        for sample in samples:
            labels.append(sample.good)
            yield sample.document

    window: list[Example] = []
    before: Example | None = None
    for example in tokenize.each(documents()):
        good = labels.pop(0)
        if example is None:
            continue
        window.append(dataclasses.replace(example, value=float(good)))
        if len(window) == _WINDOW:
            yield from _with_companions(window, before, tokenize.options.max_length)
            before, window = window[-1], []
    yield from _with_companions(window, before, tokenize.options.max_length)


_WINDOW = 256


def _with_companions(window: list[Example], before: Example | None, max_length: int) -> Iterator[Example]:
    before = before or (window[-1] if window else None)
    for example in window:
        assert before is not None
        yield example
        here, there = (int(np.argmax(one.weights > 0)) for one in (example, before))
        # However long the prompt, one token of an answer must be left of it.
        prompt = min(here, max_length - 1)
        ids = np.concatenate([example.ids[:prompt], before.ids[there:]])[:max_length]
        weights = np.concatenate([example.weights[:prompt], before.weights[there:]])[:max_length]
        yield dataclasses.replace(example, ids=ids, weights=weights)
        before = example


def _read_at_the_end(example: Example) -> Example:
    # A target beyond the last token makes a position of that token; what is predicted there is not looked at.
    ids = np.append(example.ids, example.ids[-1])
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = 1.0
    return dataclasses.replace(example, ids=ids, weights=weights)


def _uncount(tokenize: Tokenize, *sides: Example | None) -> None:
    for side in sides:
        if side is not None:
            tokenize.counts.examples -= 1
            tokenize.counts.tokens -= len(side.ids)
            tokenize.counts.learned -= int(np.count_nonzero(side.weights[1:]))
    if all(side is not None for side in sides):
        tokenize.counts.nothing_after_truncation += 1  # equal once they are cut
