"""Which records of an evaluation are in the training data: whole, or a run of words of theirs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

from meshtune.data.conversation import Conversation, Document, Labelled, Pair, Sample
from meshtune.evaluate.metrics import WORD

RUN_LENGTH = 13  # in a run, as in GPT-3's report (https://arxiv.org/abs/2005.14165)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Numbers of the evaluation's records: `copies` that training had whole, `shared` that have a run of RUN_LENGTH
    words in common with it, copies included, of `records`."""

    copies: list[int]
    shared: list[int]
    records: int

    @property
    def is_training_set(self) -> bool:
        """Whether every record was trained on."""
        return len(self.copies) == self.records

    def __str__(self) -> str:
        if self.is_training_set:
            return (
                f"THE EVALUATION DATA ARE TRAINING DATA: all {self.records} records were trained on. "
                "The numbers say how well they were learned by heart, and nothing of new questions."
            )
        share = len(self.shared) / self.records
        return (
            f"{len(self.copies)} of {self.records} records were trained on as they are, and {len(self.shared)} "
            f"({share:.0%}) have {RUN_LENGTH} words in a row in common with the training data."
        )


def overlap(evaluation: Sequence[Sample], training: Iterable[Sample]) -> Overlap:
    """The overlap of two sets of samples. Words are compared in lower case, without punctuation."""
    texts = [words_of(sample) for sample in evaluation]
    by_text: dict[bytes, list[int]] = {}
    by_run: dict[bytes, list[int]] = {}
    for number, text in enumerate(texts):
        by_text.setdefault(_hash(text), []).append(number)
        for run in _runs(text):
            by_run.setdefault(run, []).append(number)
    copies: set[int] = set()
    shared: set[int] = set()
    for sample in training:
        text = words_of(sample)
        copies.update(by_text.get(_hash(text), ()))
        for run in _runs(text):
            shared.update(by_run.get(run, ()))
    return Overlap(sorted(copies), sorted(shared | copies), len(texts))


def words_of(sample: Sample) -> list[str]:
    """The words of all turns of a sample but a system prompt, which records share by intention."""
    match sample:
        case Pair():
            return words_of(sample.chosen)
        case Labelled():
            return words_of(sample.document)
        case _:
            return [word.lower() for word in WORD.findall(_text(sample))]


def _text(document: Document) -> str:
    if isinstance(document, Conversation):
        return "\n".join(message.content for message in document.messages if message.role != "system")
    return document.prompt + document.text


def _runs(tokens: Sequence[str]) -> Iterable[bytes]:
    return (_hash(tokens[start : start + RUN_LENGTH]) for start in range(len(tokens) - RUN_LENGTH + 1))


def _hash(tokens: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join(tokens).encode(), digest_size=12).digest()
