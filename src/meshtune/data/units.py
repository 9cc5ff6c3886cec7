"""Units of documents that are trained on together: a chosen and a rejected answer, or an example and its companion.

Neighbouring documents of a store are a unit; in a packed row they are neighbouring segments. Properties of units are
further arrays of a batch (see objectives.score.Batch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from meshtune.arrays.batch import empty_arrays
from meshtune.data.conversation import Labelled, Pair
from meshtune.data.store import Store
from meshtune.data.tokens import Example, Tokenize
from meshtune.objectives.config import NllMean


@dataclasses.dataclass(frozen=True)
class Units:
    """Options of the arrays that a batch of units of `segments` documents has in addition to those of tokens.

    `reference` float32 [documents] are log-probabilities of a reference model. `nll` requests the weights of the first
    documents' cross-entropy, over their answers or all their tokens. With `nll_mean` pairs the weights of each unit add
    up to one; with tokens they add up to the number of units in one update or, with `nll_share` (units per token of the
    whole store), in all updates of an epoch together.
    """

    segments: int = 2
    reference: np.ndarray | None = None
    nll: Literal["answer", "all"] | None = None
    nll_mean: NllMean = "tokens"
    nll_share: float | None = None

    def arrays(
        self,
        row_values: Sequence[Sequence[float]],
        row_units: Sequence[np.ndarray],
        sizes: Mapping[str, int],
        tokens: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """The arrays of rows with the units `row_units`, whose values are `row_values`: units, values, and where they
        are asked for reference and nll (see arrays.batch, and `sizes` of its axes)."""
        arrays = empty_arrays(["units", "values", *(["reference"] if self.reference is not None else [])], sizes)
        for row, (units, values) in enumerate(zip(row_units, row_values, strict=True)):
            arrays["units"][row, : len(units)] = 1.0
            arrays["values"][row, : len(units)] = values
            if self.reference is not None:
                of_units = self.reference.reshape(-1, self.segments)[units].ravel()
                arrays["reference"][row, : len(of_units)] = of_units
        if self.nll is not None:
            first = (tokens["segment_ids"] > 0) & ((tokens["segment_ids"] - 1) % self.segments == 0)
            counted = first if self.nll == "all" else first & (tokens["weights"] > 0)
            if self.nll_mean == "pairs":
                share = _reciprocal_counts(tokens["segment_ids"], counted)
            else:
                share = self.nll_share or float(arrays["units"].sum()) / max(1, int(counted.sum()))
            arrays["nll"] = np.where(counted, share, 0.0).astype(np.float32)
        return arrays


def _reciprocal_counts(segment_ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """For each position, one over the number of counted positions of its segment: float64 [rows, T]."""
    shares = np.zeros(segment_ids.shape)
    for row, (segments, selected) in enumerate(zip(segment_ids, counted, strict=True)):
        shares[row] = 1 / np.maximum(1, np.bincount(segments[selected], minlength=segments.max() + 1))[segments]
    return shares


def nll_share(store: Store, units: Units) -> float | None:
    """Units per token that `units.nll` counts, over a whole store; None without it."""
    if units.nll is None:
        return None
    tokens = 0
    for document in range(0, len(store), units.segments):
        start, end = store.offsets[document] + 1, store.offsets[document + 1]
        tokens += int(end - start) if units.nll == "all" else int(np.count_nonzero(store.weights[start:end]))
    return len(store) / units.segments / max(1, tokens)


def tokenise_pairs(tokenize: Tokenize, pairs: Iterable[Pair], *, score_position: bool = False) -> Iterator[Example]:
    """Two examples per pair, the chosen answer first. A pair with nothing to train on in either side is left out.

    With `score_position` only the position after an answer's last token has a weight, where its score is read.
    """
    pending: list[Pair] = []

    def sides():
        for pair in pairs:
            pending.append(pair)
            yield pair.chosen
            yield pair.rejected

    examples = tokenize.tokenise_each(sides(), sides=2)
    for chosen in examples:
        rejected, pair = next(examples), pending.pop(0)
        if chosen is None or rejected is None or np.array_equal(chosen.ids, rejected.ids):
            _uncount(tokenize, chosen, rejected)
            continue
        for side in (chosen, rejected):
            example = dataclasses.replace(side, value=pair.margin)
            yield _with_score_position(example) if score_position else example


def tokenise_labelled(tokenize: Tokenize, samples: Iterable[Labelled]) -> Iterator[Example]:
    """Two examples per labelled answer: the answer itself and its companion (see `with_companions`)."""
    return with_companions(tokenise_answers(tokenize, samples), tokenize.options.max_length)


def tokenise_answers(tokenize: Tokenize, samples: Iterable[Labelled]) -> Iterator[Example]:
    """One example per labelled answer that has something to train on, whose value is its label."""
    labels: list[bool] = []

    def documents():
        for sample in samples:
            labels.append(sample.good)
            yield sample.document

    for example in tokenize.tokenise_each(documents(), sides=1):
        good = labels.pop(0)
        if example is not None:
            yield dataclasses.replace(example, value=float(good))


def with_companions(examples: Iterable[Example], max_length: int) -> Iterator[Example]:
    """Each example, and after it a companion: its prompt with the previous example's answer.

    The companion estimates the KL baseline of KTO (https://arxiv.org/abs/2402.01306). The first example takes the last
    answer of its window.
    """
    window: list[Example] = []
    previous: Example | None = None
    for example in examples:
        window.append(example)
        if len(window) == _WINDOW:
            yield from _with_companions(window, previous, max_length)
            previous, window = window[-1], []
    yield from _with_companions(window, previous, max_length)


_WINDOW = 256


def _with_companions(window: list[Example], previous: Example | None, max_length: int) -> Iterator[Example]:
    previous = previous or (window[-1] if window else None)
    for example in window:
        assert previous is not None
        yield example
        answer_start, previous_start = (int(np.argmax(side.weights > 0)) for side in (example, previous))
        # However long the prompt, at least one token of the answer must fit.
        prompt = min(answer_start, max_length - 1)
        ids = np.concatenate([example.ids[:prompt], previous.ids[previous_start:]])[:max_length]
        weights = np.concatenate([example.weights[:prompt], previous.weights[previous_start:]])[:max_length]
        yield dataclasses.replace(example, ids=ids, weights=weights)
        previous = example


def _with_score_position(example: Example) -> Example:
    # Positions are made of targets, so a further target makes a position of the last token; its id does not matter.
    ids = np.append(example.ids, example.ids[-1])
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = 1.0
    return dataclasses.replace(example, ids=ids, weights=weights)


def _uncount(tokenize: Tokenize, *sides: Example | None) -> None:
    """Takes the sides of a pair that is left out back out of the counts."""
    for side in sides:
        if side is not None:
            tokenize.counts.examples -= 1
            tokenize.counts.tokens -= len(side.ids)
            tokenize.counts.trained_tokens -= int(np.count_nonzero(side.weights[1:]))
    if all(side is not None for side in sides):
        side = sides[0]
        assert side is not None
        tokenize.counts.count("nothing_after_truncation", side.origin)  # equal once truncated
