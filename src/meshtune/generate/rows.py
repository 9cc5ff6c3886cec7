"""The rows of a batch and the caches behind them: which request has which row, and what of its prompt is read.

A prompt is read in pieces, so that a long one does not keep other rows from decoding. What a row holds stays until
another request needs the row, so a prompt that begins as one that was read before is read from there on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshtune.generate import programs
from meshtune.generate.batch_caches import BatchCaches
from meshtune.generate.long_context import original_context
from meshtune.generate.programs import length_bucket, rows_bucket
from meshtune.generate.request import Generation
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

ROOM = 512  # slots made at first for tokens to come; a longer text lets the cache grow
FEWEST_SLOTS = 128  # then powers of two: empty slots cost little, another length costs a compilation
SHORTEST_SHARED = 16  # tokens at least that are not read again where another row has them


@dataclasses.dataclass(eq=False)
class Row:
    """A row of the batch: the tokens that its cache holds and the adapter that read them, the tokens of the prompt that
    are still to be read, the newest token, which a decode step reads, and whose row it is. Of a model with LongRoPE,
    `original` is its original context, and `long` whether the cache was read by the long factors."""

    cached: list[int] = dataclasses.field(default_factory=list)
    adapter: int | None = None
    original: int | None = None
    long: bool = False
    unread: list[int] = dataclasses.field(default_factory=list)
    newest: int = 0
    generation: Generation | None = None
    started: bool = True  # whether something of the prompt has been read, or found in a row
    admitted: int = 0  # the number of the request
    last_used: int = 0

    @property
    def decodes(self) -> bool:
        """Whether the row has a request whose prompt is read."""
        return self.generation is not None and self.started and not self.unread

    @property
    def request_adapter(self) -> int | None:
        """The adapter that the row's request selects."""
        return None if self.generation is None else self.generation.request.adapter

    @property
    def expected(self) -> list[int]:
        """The tokens that the cache holds once the prompt is read."""
        return [*self.cached, *self.unread] if self.started else self.unread

    @property
    def remaining(self) -> int:
        """Tokens that a decode step may still generate."""
        if self.generation is None or not self.decodes:
            return 0
        remaining = self.generation.request.max_tokens - len(self.generation.tokens)
        return remaining if self.original is None or self.long else min(remaining, self.original - len(self.cached))

    @property
    def text(self) -> list[int]:
        """The tokens of the prompt and those generated since."""
        return [] if self.generation is None else [*self.generation.request.prompt, *self.generation.ids]

    @property
    def text_is_long(self) -> bool:
        """Whether the text is longer than the original context."""
        return self.original is not None and len(self.text) > self.original


class _Piece(NamedTuple):
    """Tokens to read into row `target`, behind the first `length` tokens of row `source`."""

    target: int
    source: int
    length: int
    tokens: Sequence[int]
    long: bool

    @property
    def shape(self) -> tuple[bool, int, bool]:
        """Pieces of one shape are read together: whether a row goes on, the bucket of the tokens, and whether they are
        a long text's."""
        return self.length > 0, length_bucket(max(1, len(self.tokens))), self.long


class Rows:
    """The rows, whose `caches` have `slots` tokens a row; `adapters` is the number of those they select among."""

    def __init__(self, caches: BatchCaches, spec: ModelSpec, compute: Compute, adapters: int):
        self._caches, self._spec, self._compute = caches, spec, compute
        self.adapters = adapters
        self.rows: list[Row] = []
        self.slots = 0
        self._original = original_context(spec)
        self._admissions = 0

    @property
    def running(self) -> int:
        """Rows that have a request."""
        return sum(row.generation is not None for row in self.rows)

    def clear(self) -> None:
        """Forgets all rows, and what they hold on the devices."""
        self.rows, self.slots = [], 0
        self._caches.layers, self._caches.counts = {}, None

    def make_room(self, admitted: Sequence[Generation]) -> None:
        """Makes rows and slots for requests: as few rows as do, for every row costs time in every step."""
        count = rows_bucket(self.running + len(admitted))
        longest = max(len(g.request.prompt) + min(g.request.max_tokens, ROOM) for g in admitted)
        if not self.running and 4 * longest <= self.slots:
            self.rows, self.slots = [], 0
        self.resize(count, longest)

    def resize(self, count: int, length: int) -> None:
        """Makes rows for `count` generations at least, of `length` tokens at least.

        Empty rows are dropped first, the oldest first. The others keep their order, which decode steps rely on.
        """
        slots = max(FEWEST_SLOTS, self.slots, 1 << (length - 1).bit_length())
        count = count if count > len(self.rows) or 4 * count <= len(self.rows) else len(self.rows)
        if slots == self.slots and count == len(self.rows):
            return
        by_use = sorted(range(len(self.rows)), key=lambda n: (self.rows[n].generation is None, -self.rows[n].last_used))
        source = sorted(by_use[:count])
        retained = [self.rows[n] for n in source]
        if retained:
            source += [0] * (count - len(retained))
            self._caches.move(np.asarray(source, np.int32), slots)
        else:
            self._caches.create(count, slots)
        self.rows = retained + [Row(original=self._original) for _ in range(count - len(retained))]
        self.slots = slots

    def place(self, generation: Generation, clock: int) -> None:
        """Gives a request a free row: the one where its prompt goes on, or one whose text is needed least."""
        prompt = generation.request.prompt[:-1]
        free = [row for row in self.rows if row.generation is None]
        is_long = self._original is not None and len(generation.request.prompt) > self._original
        source, length = self._best(prompt, self._read_by(generation.request.adapter, is_long))
        if not (length and source in free and length == len(source.cached)):
            others = [row for row in free if row is not source] or free
            source = min(others, key=lambda row: (len(row.cached) > 0, row.last_used))
        self._admissions += 1
        source.unread, source.newest, source.generation = list(prompt), generation.request.prompt[-1], generation
        source.started, source.admitted, source.last_used = False, self._admissions, clock

    def end(self, generation: Generation, clock: int) -> None:
        """Frees a request's row. What it holds of the text stays."""
        for row in self.rows:
            if row.generation is generation:
                row.generation, row.unread, row.started, row.last_used = None, [], True, clock

    def read(self, most: int) -> None:
        """Reads at most `most` tokens of prompts, the oldest request's first, and of texts that have become long."""
        for row in self.rows:
            if row.decodes and row.text_is_long and not row.long:
                row.cached, row.unread, row.started = [], row.text[:-1], False
        batch: list[_Piece] = []
        reading = [row for row in self.rows if row.generation is not None and not row.decodes]
        for row in sorted(reading, key=lambda row: row.admitted):
            piece = self._piece(row, most)
            if piece is None and batch:  # it waits for what a row before it reads, perhaps in this batch
                self._compute_pieces(batch)
                batch, piece = [], self._piece(row, most)
            if piece is None:
                continue
            depends = any(piece.source == earlier.target for earlier in batch)
            if batch and (depends or piece.shape != batch[0].shape):
                self._compute_pieces(batch)
                batch = []
            if piece.tokens or piece.source != piece.target or not piece.length:  # an empty row may hold a state
                batch.append(piece)
            most -= len(piece.tokens)
            text = row.text
            row.cached, row.adapter, row.long = (
                text[: piece.length + len(piece.tokens)],
                row.request_adapter,
                piece.long,
            )
            row.unread, row.started = text[len(row.cached) : -1], True
        self._compute_pieces(batch)

    def _piece(self, row: Row, most: int) -> _Piece | None:
        """What is to be read of a row's prompt next, `most` tokens at most; None where it has to wait."""
        target, is_long = self.rows.index(row), row.text_is_long
        if row.started:
            return _Piece(target, target, len(row.cached), row.unread[:most], is_long) if most > 0 else None
        earlier = [other for other in self.rows if other.admitted < row.admitted and not other.decodes]
        siblings = [
            other
            for other in earlier
            if other.generation and (other.request_adapter, other.text_is_long) == (row.request_adapter, is_long)
        ]
        source, length = self._best(row.unread, self._read_by(row.request_adapter, is_long))
        _, later = self._best(row.unread, siblings, expected=True)
        if later > length or (most <= 0 and length < len(row.unread)):
            return None
        source_row = self.rows.index(source) if length else target
        return _Piece(target, source_row, length, row.unread[length:][:most], is_long)

    def _read_by(self, adapter: int | None, is_long: bool) -> list[Row]:
        """The rows whose tokens an adapter read, as parts of long texts or not: otherwise the same tokens have other
        keys and values."""
        return [row for row in self.rows if (row.adapter, row.long) == (adapter, is_long)]

    def selection(self, rows: Sequence[Row | None]) -> np.ndarray | None:
        """Float32 [len(rows), N], one where a row's request selects an adapter; None where there are none."""
        if not self.adapters:
            return None
        selection = np.zeros((len(rows), self.adapters), np.float32)
        for n, row in enumerate(rows):
            if row is not None and row.request_adapter is not None:
                selection[n, row.request_adapter] = 1
        return selection

    def _best(self, prompt: Sequence[int], rows: Sequence[Row], *, expected: bool = False) -> tuple[Row, int]:
        """The row that holds most of a prompt, or will (`expected`), and how many tokens of it."""
        shared = [(self._shared(row.expected if expected else row.cached, prompt), row) for row in rows]
        length, row = max(shared, key=lambda pair: pair[0], default=(0, Row()))
        return row, length if length >= min(SHORTEST_SHARED, len(prompt)) else 0

    def _shared(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """How many of the tokens of `prompt` need not be read where a row holds `cached`."""
        common = next(
            (n for n, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), min(len(cached), len(prompt))
        )
        whole = common == len(cached) or programs.holds_every_token(self._spec, self._compute, self.slots)
        return common if whole else 0

    def _compute_pieces(self, batch: Sequence[_Piece]) -> None:
        """Reads pieces of one shape."""
        if not batch:
            return
        count, length = rows_bucket(len(batch)), batch[0].shape[1]
        tokens, unread = np.zeros((count, length), np.int32), np.zeros(count, np.int32)
        source, known = np.zeros(count, np.int32), np.zeros(count, np.int32)
        target = np.full(count, len(self.rows), np.int32)  # beyond the end: dropped
        for n, piece in enumerate(batch):
            unread[n] = len(piece.tokens)
            tokens[n, : unread[n]] = piece.tokens
            source[n], known[n], target[n] = piece.source, piece.length, piece.target
        targets = [self.rows[piece.target] for piece in batch]
        adapters = self.selection([*targets, *[None] * (count - len(batch))])
        if batch[0].length:
            self._caches.read_on(tokens, unread, source, known, target, adapters, batch[0].long)
        else:
            self._caches.read_new(tokens, unread, target, adapters, batch[0].long)
