"""Filters of records: those that look at one record, and those that compare all of them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshtune.config.data_recipe import DataRecipe, Filters
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Conversation, Message, Origin, Sample
from meshtune.data.documents import load_documents
from meshtune.errors import UserError
from meshtune.evaluate.metrics import WORD
from meshtune.evaluate.statistics import text_marks
from meshtune.synth.documents import count_words
from meshtune.synth.kinds import conversation_text, package

PERMUTATIONS = 128  # of MinHash: a standard error of 0.04 at a similarity of 0.8
SHINGLE = 3  # words in a row
SHORTEST_LANGUAGE = 20  # characters: the language of fewer is a guess
REFUSAL = re.compile(
    r"^\W*(i'?m sorry|i am sorry|sorry,|i apologi[sz]e|unfortunately, i|i (can(no|')t|am unable|'m unable|won't)\b)"
    r"|\bas an? (ai|artificial intelligence|(large )?language model)\b|\bi'?m (just )?an? (ai|language model)\b"
    r"|^\W*(es tut mir leid|als ki\b|je suis désolé|lo siento|对不起|抱歉|很抱歉|作为一个?(人工智能|语言模型|ai))",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class MadeRecord:
    """A record before it is written. `question` and `answer` are the texts that filters read, `passage` that in
    which the answer must be grounded."""

    fields: Mapping[str, Any]
    question: str
    answer: str
    passage: str
    held_out: bool

    @property
    def is_pair(self) -> bool:
        """Whether it is a preference pair."""
        return "chosen" in self.fields

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation; of a pair with the chosen answer."""
        if self.is_pair:
            return [*self.fields["prompt"], *self.fields["chosen"]]
        return list(self.fields["messages"])


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A text that a filter dropped, and the reason."""

    filter: str
    reason: str
    text: str
    source: str
    place: str


def check_filters(recipe: DataRecipe) -> None:
    """Raises UserError where a filter's package is missing, or its data cannot be read: before anything is asked."""
    package("jsonschema", "answers are compared with their schema")
    if recipe.filters.duplicates is not None:
        package("datasketch", "near duplicates are compared")
    if recipe.filters.language is not None:
        languages = sorted(os.listdir(package("langdetect", "languages are recognised").PROFILES_DIRECTORY))
        if recipe.filters.language not in languages:
            problem = f"'{recipe.filters.language}' is no code of a language that is recognised"
            raise UserError(problem, where="filters.language", fix=f"give one of {', '.join(languages)}")
        _language_of("This sentence is read so that profiles of languages are loaded by one thread.")
    load_sources(recipe.filters.evaluation, "filters.evaluation")


def local_filters(filters: Filters) -> Iterator[tuple[str, Callable[[MadeRecord], str | None]]]:
    """(name, function that says why a record is dropped) of each filter that needs nothing but the record."""

    def empty(record: MadeRecord) -> str | None:
        texts = [message["content"] or message.get("tool_calls") for message in record.messages]
        return None if all(texts) and record.question.strip() else "a message is empty"

    def by_length(record: MadeRecord) -> str | None:
        bounds, length = filters.length, count_words(record.answer)
        if length < bounds.min_words and not any("tool_calls" in message for message in record.messages):
            return f"{length} words"
        return f"{length} words" if bounds.max_words is not None and length > bounds.max_words else None

    def refusals(record: MadeRecord) -> str | None:
        match = REFUSAL.search(record.answer)
        return None if match is None else f"'{match[0].strip()}'"

    def language(record: MadeRecord) -> str | None:
        if len(record.answer) < SHORTEST_LANGUAGE:
            return None
        name = _language_of(record.answer)
        return None if name == filters.language else f"it is '{name}'"

    yield "schema", empty
    yield "length", by_length
    if filters.refusals:
        yield "refusals", refusals
    if filters.language is not None:
        yield "language", language


def _language_of(text: str) -> str:
    langdetect = package("langdetect", "languages are recognised")
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:  # no letters
        return "unknown"


class Duplicates:
    """The records so far, which later ones are compared with by MinHash (datasketch): 5 kB of memory each."""

    def __init__(self, similarity: float):
        self._datasketch = package("datasketch", "near duplicates are compared")
        self._similarity = similarity
        self._index = self._datasketch.MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
        self._hashes: list[np.ndarray] = []
        self._texts: list[str] = []

    def add(self, record: MadeRecord) -> str | None:
        """Adds a record, or says which earlier one it is a near duplicate of."""
        text = conversation_text(record.messages)
        sketch = self._datasketch.MinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update_batch([shingle.encode() for shingle in _shingles(text)])
        near = sorted(self._index.query(sketch))
        likeness = [(float(np.mean(sketch.hashvalues == self._hashes[number])), number) for number in near]
        similar = [(value, number) for value, number in likeness if value >= self._similarity]
        if similar:
            value, number = max(similar)
            return f"similarity {value:.2f} to: {self._texts[number]}"
        self._index.insert(len(self._hashes), sketch)
        self._hashes.append(sketch.hashvalues.astype(np.uint32))
        self._texts.append(text[:200])
        return None


def _shingles(text: str) -> set[str]:
    tokens = [word.lower() for word in WORD.findall(text)]
    return {" ".join(tokens[start : start + SHINGLE]) for start in range(max(1, len(tokens) - SHINGLE + 1))}


def evaluation_marks(filters: Filters) -> frozenset[bytes]:
    """The marks of evaluation data, by which `meshtune eval` counts words in common."""
    documents = load_sources(filters.evaluation, "filters.evaluation")
    return frozenset().union(*map(text_marks, documents))


def record_marks(record: MadeRecord) -> set[bytes]:
    """The marks of a record."""
    return text_marks(_conversation(record))


def load_sources(sources: Sequence[SourceSection], key: str) -> Sequence[Sample]:
    """The records of the sources that a key names. Raises UserError for one that is missing or damaged."""
    if not sources:
        return ()
    try:
        return load_documents(DataSection(train=list(sources), packing=False), seed=0).train
    except UserError as problem:
        fix = problem.fix and problem.fix.replace("data.train=", f"{key}=")
        raise UserError(problem.what, where=f"{key}, {problem.where or ''}".rstrip(", "), fix=fix) from problem


def _conversation(record: MadeRecord) -> Conversation:
    messages = tuple(Message(message["role"], str(message["content"])) for message in record.messages)
    return Conversation(messages, Origin("generated", 0))


def drop(record: MadeRecord, name: str, reason: str) -> Dropped:
    """A record as one that a filter dropped."""
    provenance = record.fields["provenance"]
    return Dropped(name, reason, conversation_text(record.messages), provenance["source"], provenance["place"])
