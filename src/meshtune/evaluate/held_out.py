"""The loss of a model on held-out records: that of training, over the tokens a run would learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.data.tokens import Example, Tokenize
from meshtune.errors import UserError
from meshtune.evaluate.progress import Report
from meshtune.evaluate.records import Record
from meshtune.generate.api import Model
from meshtune.generate.prefix_tree import ScoredText


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Losses in nats: `loss` per token, over all tokens; `records` per token of each record (None: it has none to
    learn), and `tokens` of each."""

    loss: float
    records: list[float | None]
    tokens: list[int]
    truncated: int


def held_out_loss(
    model: Model, records: Sequence[Record], *, policy: LossPolicy = LossPolicy(), progress: Report | None = None
) -> HeldOut:
    """The loss on every assistant turn, or the text after its prompt, of records as training tokenises them.

    Records beyond the model's context are cut, and counted. Raises UserError where nothing can be learned from any.
    """
    tokenize = Tokenize(model.tokenizer, TokenOptions(max_length=model.engine.context, policy=policy))
    examples = list(tokenize.tokenise_each(record.document for record in records))
    usable = [example for example in examples if example is not None]
    if not usable:
        raise UserError(
            "the data have no answer to compute a loss of",
            where=records[0].origin.partition(", record")[0],
            fix="see `meshtune data inspect`, or leave the loss out: --no-loss",
        )
    texts = [ScoredText(tuple(example.ids.tolist()), _first(example)) for example in usable]
    scores = iter(model.score(texts, progress))
    sums, weights = np.zeros(len(examples)), np.zeros(len(examples))
    for number, example in enumerate(examples):
        if example is not None:
            weight = example.weights[_first(example) :].astype(np.float64)
            sums[number] = -float(np.sum(weight * next(scores).log_probabilities))
            weights[number] = weight.sum()
    losses = [float(total / weight) if weight else None for total, weight in zip(sums, weights, strict=True)]
    tokens = [0 if example is None else int(np.count_nonzero(example.weights[1:])) for example in examples]
    return HeldOut(float(sums.sum() / weights.sum()), losses, tokens, tokenize.counts.truncated)


def _first(example: Example) -> int:
    """The first token with a weight, of those that are predicted."""
    return 1 + int(np.flatnonzero(example.weights[1:])[0])
