"""Examples that a stage makes of samples: those of documents, of pairs or of labelled answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from meshtune.data.conversation import Conversation, Document
from meshtune.data.tokens import Example, Tokenize
from meshtune.data.units import tokenise_answers, tokenise_pairs
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType


@dataclasses.dataclass(frozen=True)
class StageExamples:
    """Makes the examples of samples for a stage. Those of labelled answers have no companions yet
    (units.with_companions).

    `score_position`: pairs are trained on only after their last token. `plain_text`: conversations are refused.
    """

    dataset_type: DatasetType
    score_position: bool = False
    plain_text: bool = False

    def __call__(self, tokenize: Tokenize, samples: Iterable[Any]) -> Iterator[Example]:
        match self.dataset_type:
            case "pairs":
                return tokenise_pairs(tokenize, samples, score_position=self.score_position)
            case "labelled":
                return tokenise_answers(tokenize, samples)
            case "documents":
                return tokenize(require_plain_text(samples) if self.plain_text else samples)


def require_plain_text(documents: Iterable[Document]) -> Iterator[Document]:
    """Passes texts through. Raises UserError for a conversation."""
    for document in documents:
        if isinstance(document, Conversation):
            raise UserError(
                "stage pt trains on plain text, but the record is a conversation",
                where=str(document.origin),
                fix="set stage: sft, or name the column that holds the text: format: text, columns: {text: NAME}",
            )
        yield document
