"""Adds the recipe's system prompt to conversations that have none."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

from meshtune.data.conversation import Conversation, Document, Labelled, Message, Pair, Sample
from meshtune.data.documents import DocumentList


@dataclasses.dataclass(frozen=True)
class WithSystemPrompt(Sequence[Sample]):
    """Samples with `system` before every conversation that has no system turn, added as each is read."""

    samples: DocumentList
    system: str | None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]: no slices
        sample = self.samples[index]
        return sample if self.system is None else self._with_system(sample)

    def _with_system(self, sample: Sample) -> Sample:
        match sample:
            case Pair():
                chosen, rejected = self._add(sample.chosen), self._add(sample.rejected)
                return dataclasses.replace(sample, chosen=chosen, rejected=rejected)
            case Labelled():
                return dataclasses.replace(sample, document=self._add(sample.document))
            case _:
                return self._add(sample)

    def content_hash(self) -> str:
        """A hash of all samples in order."""
        return hashlib.sha256(f"{self.samples.content_hash()} {self.system!r}".encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Raises UserError if a file has changed since it was opened."""
        self.samples.check_unchanged()

    def _add(self, document: Document) -> Document:
        assert self.system is not None
        if not isinstance(document, Conversation):
            return dataclasses.replace(document, system_prompt=self.system)
        if any(message.role == "system" for message in document.messages):
            return document
        return dataclasses.replace(document, messages=(Message("system", self.system), *document.messages))

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))
