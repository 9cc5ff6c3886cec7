"""The rows of a batch: which request has which row, and which tokens of its text are still to be read into the cache.

A prompt is read in pieces, so that a long one does not keep other rows from decoding. The cache of a row stays until
another request needs the row, so a text that begins as one that was read before is read from there on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshtune.generate.driver import BatchCaches
from meshtune.generate.programs import length_bucket, rows_bucket
from meshtune.generate.request import Generation

ROOM = 512  # slots made at first for tokens to come; a longer text lets the cache grow
FEWEST_SLOTS = 128  # then powers of two: empty slots cost little, another length costs a compilation
SHORTEST_SHARED = 16  # tokens at least that are not read again where another row has them


@dataclasses.dataclass
class CachedText:
    """Tokens whose keys and values a cache holds, or will hold, with all else that these depend on.

    `adapter` read them, by the `long` factors of a model with LongRoPE or by the short ones; `content_keys` are those
    of the request.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    adapter: int | None = None
    long: bool = False
    content_keys: Mapping[int, bytes] = dataclasses.field(default_factory=dict)

    def shared(self, reader: CachedText) -> int:
        """The number of first tokens whose keys and values are the same in both."""
        if (self.adapter, self.long) != (reader.adapter, reader.long):
            return 0
        shorter = min(len(self.tokens), len(reader.tokens))
        pairs = enumerate(zip(self.tokens, reader.tokens, strict=False))
        common = next((n for n, (ours, theirs) in pairs if ours != theirs), shorter)
        positions = self.content_keys.keys() | reader.content_keys.keys()
        differing = [n for n in positions if self.content_keys.get(n) != reader.content_keys.get(n)]
        return min([common, *differing])


@dataclasses.dataclass(eq=False)
class Row:
    """A row of the batch: the text that its cache holds, and the request that it belongs to (None: it is free).

    `started`: the cached text is the beginning of the request's; before, it is that of an earlier request. `number`
    counts the requests that got a row, and `last_used` is the scheduler's step in which the row was used last.
    """

    cached: CachedText = dataclasses.field(default_factory=CachedText)
    generation: Generation | None = None
    started: bool = True
    number: int = 0
    last_used: int = 0

    @property
    def decodes(self) -> bool:
        """Whether all of the request's text but its newest token is read."""
        return self.generation is not None and self.started and len(self.cached.tokens) == self.generation.length - 1

    @property
    def adapter(self) -> int | None:
        """The adapter that the request selects."""
        return None if self.generation is None else self.generation.request.adapter


class _Piece(NamedTuple):
    """Tokens to read into row number `target`, after the first `length` tokens of row number `source`."""

    target: int
    source: int
    length: int
    tokens: Sequence[int]
    text: CachedText

    @property
    def shape(self) -> tuple[bool, int, bool]:
        """Pieces of one shape are read together: they continue a row or not, in a bucket of lengths, of long texts or
        not."""
        return self.length > 0, length_bucket(max(1, len(self.tokens))), self.text.long


class Rows:
    """The rows, whose `caches` have `slots` tokens a row.

    `adapters` is the number of those that requests select among, and `original` the original context of a model with
    LongRoPE (generate.long_context).
    """

    def __init__(self, caches: BatchCaches, adapters: int, original: int | None):
        self._caches, self._original = caches, original
        self.adapters = adapters
        self.rows: list[Row] = []
        self.slots = 0
        self._any_length = False  # whether a row can go back to any earlier length
        self._requests = 0

    @property
    def running(self) -> int:
        """Rows that have a request."""
        return sum(row.generation is not None for row in self.rows)

    def clear(self) -> None:
        """Drops all rows, and what they hold on the devices."""
        self.rows, self.slots = [], 0
        self._caches.layers, self._caches.counts = {}, None

    def restart(self, rows: Sequence[Row] | None = None) -> None:
        """Drops the cached text of these rows (None: of all), so that the texts of their requests are read again."""
        for row in self.rows if rows is None else rows:
            row.cached, row.started = CachedText(), row.generation is None

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
            self._caches.move(source=np.asarray(source, np.int32), slots=slots)
        else:
            self._caches.create(rows=count, slots=slots)
        self.rows = retained + [Row() for _ in range(count - len(retained))]
        self.slots, self._any_length = slots, self._caches.holds_every_token(slots)

    def place(self, generation: Generation, clock: int) -> None:
        """Gives a request a free row: the one that its prompt continues, or one whose text is needed least."""
        free = [row for row in self.rows if row.generation is None]
        source, length = self._longest_prefix(self._text(generation), [(row, row.cached) for row in self.rows])
        if source is None or source not in free or length < len(source.cached.tokens):
            candidates = [row for row in free if row is not source] or free
            source = min(candidates, key=lambda row: (len(row.cached.tokens) > 0, row.last_used))
        self._requests += 1
        source.generation, source.started, source.number, source.last_used = generation, False, self._requests, clock

    def end(self, generation: Generation, clock: int) -> None:
        """Frees a request's row. What its cache holds of the text stays."""
        for row in self.rows:
            if row.generation is generation:
                row.generation, row.started, row.last_used = None, True, clock

    def remaining(self, row: Row) -> int:
        """Tokens that decode steps may still generate before the row's text is read again, or ends."""
        if row.generation is None or not row.decodes:
            return 0
        remaining = row.generation.request.max_tokens - len(row.generation.tokens)
        if self._original is None or row.cached.long:
            return remaining
        return min(remaining, self._original - len(row.cached.tokens))

    def selection(self, rows: Sequence[Row | None]) -> np.ndarray | None:
        """Float32 [len(rows), N], one where a row's request selects an adapter; None where there are none."""
        if not self.adapters:
            return None
        selection = np.zeros((len(rows), self.adapters), np.float32)
        for n, row in enumerate(rows):
            if row is not None and row.adapter is not None:
                selection[n, row.adapter] = 1
        return selection

    # Reading

    def _text(self, generation: Generation) -> CachedText:
        """The text of a request as a cache must hold it before a decode step: without its newest token."""
        request, long = generation.request, self._original is not None and generation.length > self._original
        return CachedText(generation.text[:-1], request.adapter, long, request.content_keys)

    def read(self, budget: int) -> None:
        """Reads at most `most` tokens of texts, the oldest request's first."""
        if self._original is not None:  # a text that has become long is read again, by the long factors
            short = [row for row in self.rows if row.decodes and not row.cached.long]
            self.restart([row for row in short if row.generation and row.generation.length > self._original])
        reading = [row for row in self.rows if row.generation is not None and not row.decodes]
        batch: list[_Piece] = []
        for row in sorted(reading, key=lambda row: row.number):
            piece = self._next_piece(row, budget)
            if piece is None and batch:  # it waits for what a row before it reads, perhaps in this batch
                self._compute(batch)
                batch, piece = [], self._next_piece(row, budget)
            if piece is None:
                continue
            depends = any(piece.source == earlier.target for earlier in batch)
            if batch and (depends or piece.shape != batch[0].shape):
                self._compute(batch)
                batch = []
            if piece.tokens or piece.source != piece.target or not piece.length:  # an empty row may hold a state
                batch.append(piece)
            budget -= len(piece.tokens)
            tokens = piece.text.tokens[: piece.length + len(piece.tokens)]
            row.cached, row.started = dataclasses.replace(piece.text, tokens=tokens), True
        self._compute(batch)

    def _next_piece(self, row: Row, budget: int) -> _Piece | None:
        """The next tokens to read of a row's text, `most` at most; None where it has to wait."""
        assert row.generation is not None
        target, text = self.rows.index(row), self._text(row.generation)
        if row.started:
            length = len(row.cached.tokens)
            return _Piece(target, target, length, text.tokens[length:][:budget], text) if budget > 0 else None
        source, length = self._longest_prefix(text, [(reader, reader.cached) for reader in self.rows])
        earlier = [reader for reader in self.rows if reader.number < row.number and not reader.decodes]
        expected = [(reader, self._text(reader.generation)) for reader in earlier if reader.generation is not None]
        _, later = self._longest_prefix(text, expected)
        if later > length or (budget <= 0 and length < len(text.tokens)):
            return None
        source_number = target if source is None else self.rows.index(source)
        return _Piece(target, source_number, length, text.tokens[length:][:budget], text)

    def _longest_prefix(self, text: CachedText, rows: Sequence[tuple[Row, CachedText]]) -> tuple[Row | None, int]:
        """The row whose text shares most of this one, and how many tokens need not be read; (None, 0) for too few."""
        shared = [(text.shared(reader), row, reader) for row, reader in rows]
        usable = [(n, row) for n, row, reader in shared if self._any_length or n == len(reader.tokens)]
        length, row = max(usable, key=lambda pair: pair[0], default=(0, None))
        return (row, length) if 0 < length >= min(SHORTEST_SHARED, len(text.tokens)) else (None, 0)

    def _compute(self, batch: Sequence[_Piece]) -> None:
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
        arrays = {"tokens": tokens, "count": unread, "target": target, "adapters": adapters, "long": batch[0].text.long}
        if batch[0].length:
            arrays |= {"source": source, "length": known}
        self._caches.read(**arrays)
