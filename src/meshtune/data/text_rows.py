"""The rows of a stream of plain text, which have no padding.

Documents follow each other in a seeded order and fill every position of every row. A document that does not fit is
continued in the next row, as a separate segment that begins with the previous token, so that every token but a
document's first is predicted exactly once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshtune.data.conversation import Conversation, Text
from meshtune.data.documents import DocumentList
from meshtune.data.loader import HostBatch, packed_batch, row_sizes
from meshtune.data.packing import shuffle_order
from meshtune.data.stream import StreamPosition, unreadable
from meshtune.data.tokens import Example, Tokenize
from meshtune.errors import UserError

_GROUP = 64  # documents tokenised at once


@dataclasses.dataclass(frozen=True)
class TextRows:
    """Rows of `row_length` positions, `batch_size` of them an update of `accumulation` micro-batches.

    With `skip` records that cannot be read are left out, instead of raising UserError with the record's name.
    """

    documents: DocumentList
    tokenize: Tokenize
    row_length: int
    batch_size: int
    accumulation: int
    shuffle: bool
    seed: int
    skip: bool

    def cursor(self, position: StreamPosition) -> DocumentCursor:
        """A cursor whose next batch begins at `position`."""
        return DocumentCursor(self, position)

    def first_examples(self, count: int) -> Sequence[Example]:
        """The first `count` documents of the first epoch, for a look at the data."""
        cursor, examples = self.cursor(StreamPosition()), list[Example]()
        for _ in range(min(count, len(self.documents))):
            example, _ = cursor.current()
            if cursor.position.epoch > 0:
                break
            examples.append(example)
            cursor.advance(len(example.ids) - 1)
        return examples


class DocumentCursor:
    """A cursor over tokenised documents, epoch after epoch."""

    def __init__(self, rows: TextRows, position: StreamPosition):
        self.rows, self.position = rows, position
        self._group: list[Example | None] = []
        self._group_start = 0  # the index of the group's first document
        self._order = self._epoch_order(position.epoch)

    def batch(self, step: int) -> HostBatch:
        """The next batch, as update `step`."""
        rows, row_examples = self.rows, list[list[Example]]()
        for _ in range(rows.batch_size):
            room, examples = rows.row_length, list[Example]()
            while room:
                example, used = self.current()
                count = min(len(example.ids) - 1 - used, room)
                span = slice(used, used + count + 1)
                examples.append(dataclasses.replace(example, ids=example.ids[span], weights=example.weights[span]))
                room -= count
                self.advance(count)
            row_examples.append(examples)
        sizes = row_sizes(rows.batch_size, rows.row_length)
        return packed_batch(row_examples, [], sizes, step, self.position.epoch, accumulation=rows.accumulation)

    def current(self) -> tuple[Example, int]:
        """The document at the cursor, and how many of its positions are used."""
        empty = 0
        while True:
            if self.position.index >= len(self._order):
                self.position = StreamPosition(self.position.epoch + 1)
                self._order, self._group = self._epoch_order(self.position.epoch), []
            offset = self.position.index - self._group_start
            if not 0 <= offset < len(self._group):
                self._read_group()
                offset = 0
            example = self._group[offset]
            if example is not None and len(example.ids) > 1:
                return example, self.position.used
            empty += 1
            if empty > len(self._order):
                raise UserError(
                    "the data contain nothing to train on", where="data.train", fix="give records with text"
                )
            self.position = StreamPosition(self.position.epoch, self.position.index + 1)

    def advance(self, count: int) -> None:
        """Uses `count` positions of the current document."""
        example, used = self.current()
        if used + count == len(example.ids) - 1:
            self.position = StreamPosition(self.position.epoch, self.position.index + 1)
        else:
            self.position = dataclasses.replace(self.position, used=used + count)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        count = len(self.rows.documents)
        return shuffle_order(count, self.rows.seed, epoch) if self.rows.shuffle else np.arange(count)

    def _read_group(self) -> None:
        self._group_start = self.position.index
        documents: list[Conversation | Text | None] = []
        for index in self._order[self._group_start : self._group_start + _GROUP]:
            try:
                document = self.rows.documents[int(index)]
            except UserError as error:
                if not self.rows.skip:
                    raise unreadable(error) from None
                document = None
            assert document is None or isinstance(document, Conversation | Text)
            documents.append(document)
        examples = self.rows.tokenize.tokenise_each(document for document in documents if document is not None)
        self._group = [None if document is None else next(examples) for document in documents]
