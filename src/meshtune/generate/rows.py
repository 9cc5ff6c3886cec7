"""The rows of a batch: the texts that their caches hold, the requests that have them, and how their prompts are read.

The cache of a row stays until another request needs the row, so a text that begins as one that was read before is read
from there on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshtune.generate.pictures import PromptPictures
from meshtune.generate.programs import length_bucket
from meshtune.generate.request import Generation
from meshtune.generate.visual import piece_arrays
from meshtune.generate.weights import BatchCaches
from meshtune.model.model_cache import READ_ROWS, ROOM, rows_bucket, slots_bucket

SHORTEST_SHARED = 16  # tokens at least that are not read again where another row has them
# Tokens of prompts that are read at once: by a CPU that serves while rows decode, so that they soon go on, and else.
READ_TOKENS, READ_TOKENS_IDLE = 512, 4096
PADDING = 64  # tokens that filling up a piece on a CPU may cost rather than another call
SHORTEST_PIECE = 32  # tokens of a call on a CPU


@dataclasses.dataclass
class CachedText:
    """Tokens whose keys and values a cache holds, or will hold, with all else that these depend on.

    `tokens` are ids, and negative numbers where pictures are (`GenerationRequest.keys`). `adapter` read them, by the
    `long` factors of a model with LongRoPE or by the short ones.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    adapter: int | None = None
    long: bool = False

    def shared(self, reader: CachedText) -> int:
        """The number of first tokens whose keys and values are the same in both."""
        if (self.adapter, self.long) != (reader.adapter, reader.long):
            return 0
        shorter = min(len(self.tokens), len(reader.tokens))
        pairs = enumerate(zip(self.tokens, reader.tokens, strict=False))
        return next((n for n, (ours, theirs) in pairs if ours != theirs), shorter)


@dataclasses.dataclass(eq=False)
class Row:
    """A row of the batch: the text that its cache holds, and the request that it belongs to (None: it is free).

    `started`: the cached text is the beginning of the request's; before, it is that of an earlier request. `number`
    counts the requests that got a row, and `last_used` is the scheduler's step in which the row was used last.
    `encoded` is the first of the request's pictures whose features the caches hold, and the places for features.
    """

    cached: CachedText = dataclasses.field(default_factory=CachedText)
    generation: Generation | None = None
    started: bool = True
    number: int = 0
    last_used: int = 0
    encoded: tuple[int, int] | None = None

    @property
    def decodes(self) -> bool:
        """Whether all of the request's text but its newest token is read."""
        return self.generation is not None and self.started and len(self.cached.tokens) == self.generation.length - 1

    @property
    def adapter(self) -> int | None:
        """The adapter that the request selects."""
        return None if self.generation is None else self.generation.request.adapter


class _Piece(NamedTuple):
    """Tokens to read into row number `target`, after the first `length` tokens of row number `source`.

    They are computed as an array of `width`. `pictures` are those of the text, if it has any. Embeddings of the tokens
    are features of those from number `first` on, which are arrays of `features` entries (0: no token has one).
    """

    target: int
    source: int
    length: int
    tokens: Sequence[int]
    width: int
    text: CachedText
    pictures: PromptPictures | None = None
    first: int = 0
    features: int = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.length + len(self.tokens)

    @property
    def shape(self) -> tuple[bool, int, bool, int, bool]:
        """Pieces of one shape are computed together: they continue a row or not, in a bucket of lengths (0: only
        copied), of long texts or not, with as many features, and with M-RoPE's positions or without."""
        if self.length and not self.tokens:
            return True, 0, False, 0, False
        has_rope = self.pictures is not None and self.pictures.rope_positions is not None
        return self.length > 0, self.width, self.text.long, self.features, has_rope


def piece_length(n: int, most: int) -> tuple[int, int]:
    """(tokens to read next of `n`, their number with padding) where padding takes as long as tokens.

    All of them, unless that would take PADDING or more; powers of two up to `most`, so that few programs are compiled.
    """
    width = min(most, 1 << (max(n, SHORTEST_PIECE) - 1).bit_length())
    if width - n >= PADDING:
        width //= 2
    return min(n, width), width


class Rows:
    """The rows, whose `caches` have `slots` tokens a row.

    `adapters` is the number of those that requests select among, and `original` the original context of a model with
    LongRoPE (generate.long_context). With `interactive`, somebody waits for each row's next token.
    """

    def __init__(self, caches: BatchCaches, adapters: int, original: int | None, interactive: bool):
        self._caches, self._original, self._interactive = caches, original, interactive
        self.adapters = adapters
        self.rows: list[Row] = []
        self.slots = 0
        self._any_length = False  # whether a row can go back to any earlier length
        self._requests = 0

    @property
    def running(self) -> int:
        """Rows that have a request."""
        return sum(row.generation is not None for row in self.rows)

    @property
    def budget(self) -> int:
        """Tokens of prompts that are read at once: the more rows wait for them, beside those that decode, the more."""
        decoding = sum(row.decodes for row in self.rows)
        if not decoding or not self._interactive or not self._caches.on_cpu:
            return READ_TOKENS_IDLE
        return min(READ_TOKENS_IDLE, READ_TOKENS * max(1, (self.running - decoding) // decoding))

    def clear(self) -> None:
        """Drops all rows, and what they hold on the devices."""
        self.rows, self.slots = [], 0
        self._caches.layers, self._caches.counts, self._caches.features = {}, None, {}

    def restart(self, rows: Sequence[Row] | None = None) -> None:
        """Drops the cached text of these rows (None: of all), so that the texts of their requests are read again."""
        for row in self.rows if rows is None else rows:
            row.cached, row.started, row.encoded = CachedText(), row.generation is None, None

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
        slots = max(self.slots, slots_bucket(length))
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
        source.generation, source.started, source.encoded = generation, False, None
        source.number, source.last_used = self._requests, clock

    def end(self, generation: Generation, clock: int) -> None:
        """Frees a request's row. Its cache keeps the text's positions."""
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

    def selection(self, rows: Sequence[Row | None]) -> np.ndarray:
        """Float32 [len(rows), N], one where a row's request selects an adapter."""
        selection = np.zeros((len(rows), self.adapters), np.float32)
        for n, row in enumerate(rows):
            if row is not None and row.adapter is not None:
                selection[n, row.adapter] = 1
        return selection

    def _text(self, generation: Generation) -> CachedText:
        """The text of a request as a cache must hold it before a decode step: without its newest token."""
        request, long = generation.request, self._original is not None and generation.length > self._original
        return CachedText(generation.text[:-1], request.adapter, long)

    def read(self) -> None:
        """Reads tokens of texts: as many as the budget allows, or where nobody waits for a next token all of them, as a
        row whose text is not read decodes nothing."""
        if self._original is not None:
            self._restart_long(self._original)
        while (reading := self._reading()) and self._read(reading, self.budget) and not self._interactive:
            pass
        if self._caches.features:
            self._forget_features()

    def _reading(self) -> list[Row]:
        """The rows whose texts are not read yet, the oldest request's first."""
        reading = [row for row in self.rows if row.generation is not None and not row.decodes]
        return sorted(reading, key=lambda row: row.number)

    def _read(self, reading: list[Row], budget: int) -> bool:
        """Reads `budget` tokens of these rows' texts; whether any was left to read."""
        anything = False
        while reading:
            pieces: list[_Piece] = []
            for row in reading:
                piece = self._next_piece(row, budget)
                if piece is None or any(piece.source == earlier.target for earlier in pieces):
                    continue  # it waits for what another row reads first
                if piece.tokens or piece.source != piece.target or not piece.length:  # an empty row may hold a state
                    pieces.append(piece)
                budget -= len(piece.tokens)
                read = piece.text.tokens[: piece.length + len(piece.tokens)]
                row.cached, row.started = dataclasses.replace(piece.text, tokens=read), True
            if not pieces:
                break
            self._compute_all(pieces)
            reading, anything = [row for row in reading if not row.decodes], True
        return anything

    def _restart_long(self, original: int) -> None:
        """Lets texts that have become longer than the original context be read again, by the long factors."""
        short = [row for row in self.rows if row.decodes and not row.cached.long]
        self.restart([row for row in short if row.generation and row.generation.length > original])

    def _next_piece(self, row: Row, budget: int) -> _Piece | None:
        """The next tokens to read of a row's text, `budget` at most; None where it has to wait."""
        assert row.generation is not None
        text, source, length = self._text(row.generation), row, len(row.cached.tokens)
        if not row.started:
            source, length = self._longest_prefix(text, [(reader, reader.cached) for reader in self.rows])
            earlier = [reader for reader in self.rows if reader.number < row.number and not reader.decodes]
            expected = [(reader, self._text(reader.generation)) for reader in earlier if reader.generation is not None]
            if self._longest_prefix(text, expected)[1] > length:
                return None
        if budget <= 0 and length < len(text.tokens):
            return None
        target, tokens = self.rows.index(row), text.tokens[length:][:budget]
        count, width = len(tokens), length_bucket(max(1, len(tokens)))
        if (most := self._caches.most_tokens) is not None:
            count, width = piece_length(len(tokens), most)
        piece = _Piece(target, self.rows.index(source or row), length, tokens[:count], width, text)
        pictures = row.generation.request.pictures
        return piece if pictures is None else self._with_pictures(piece, row, pictures, budget)

    def _with_pictures(self, piece: _Piece, row: Row, pictures: PromptPictures, budget: int) -> _Piece:
        """The piece of a text with pictures. Computes the features among the embeddings of its tokens."""
        assert row.generation is not None
        text, length, ids = piece.text, piece.length, row.generation.request.prompt
        if length == len(text.tokens):
            return piece
        # The newest token is decoded, and read as well where earlier ones see it.
        end = pictures.piece_end(min(length + max(0, budget), len(text.tokens)))
        first = features = 0
        if length < pictures.end and any(key < 0 for key in text.tokens[length:end]):
            first, features = row.encoded = row.encoded or self._encode(row, pictures, length)
        tokens = [*ids, *row.generation.ids][length:end]
        width = length_bucket(max(1, len(tokens)))
        return piece._replace(tokens=tokens, width=width, pictures=pictures, first=first, features=features)

    def _encode(self, row: Row, pictures: PromptPictures, length: int) -> tuple[int, int]:
        """Computes the features of all pictures of a row's request that have tokens after the first `length`."""
        first, adapters = pictures.first_after(length), self.selection([row]) if self.adapters else None
        return first, self._caches.encode(row=row.number, **pictures.read(first)._asdict(), adapters=adapters)

    def _forget_features(self) -> None:
        """Frees the features of requests that have read their pictures, or ended."""
        encoded = [(row, row.generation.request.pictures) for row in self.rows if row.encoded and row.generation]
        needed = {row.number for row, pictures in encoded if pictures and len(row.cached.tokens) < pictures.end}
        if unneeded := sorted(self._caches.features.keys() - needed):
            self._caches.forget(rows=np.asarray(unneeded, np.int32))

    def _longest_prefix(self, text: CachedText, rows: Sequence[tuple[Row, CachedText]]) -> tuple[Row | None, int]:
        """The row whose text shares most of this one, and how many tokens need not be read; (None, 0) for too few."""
        shared = [(text.shared(reader), row, reader) for row, reader in rows if reader.tokens]
        usable = [(n, row) for n, row, reader in shared if self._any_length or n == len(reader.tokens)]
        length, row = max(usable, key=lambda pair: pair[0], default=(0, None))
        return (row, length) if 0 < length >= min(SHORTEST_SHARED, len(text.tokens)) else (None, 0)

    def _compute_all(self, pieces: list[_Piece]) -> None:
        """Reads or copies pieces, those of one shape together."""
        sources = {piece.source for piece in pieces if piece.source != piece.target}
        if not any(piece.target in sources for piece in pieces):  # else a row is read from before it has another text
            pieces.sort(key=lambda piece: piece.shape)
        count = READ_ROWS if self._caches.most_tokens is None else 1
        for _, group in itertools.groupby(pieces, lambda piece: piece.shape):
            batch = list(group)
            for start in range(0, len(batch), count):
                self._compute(batch[start : start + count])

    def _compute(self, batch: Sequence[_Piece]) -> None:
        """Reads or copies pieces of one shape."""
        count, length = rows_bucket(len(batch)), batch[0].shape[1]
        columns = [(piece.source, piece.length, piece.target, len(piece.tokens)) for piece in batch]
        columns += [(0, 0, len(self.rows), 0)] * (count - len(batch))  # beyond the end: dropped
        source, known, target, unread = np.asarray(list(zip(*columns, strict=True)), np.int32)
        if not length:
            self._caches.copy(source=source, target=target)
            return
        tokens = np.zeros((count, length), np.int32)
        for n, piece in enumerate(batch):
            tokens[n, : unread[n]] = piece.tokens
        arrays: dict[str, Any] = {"tokens": tokens, "count": unread, "target": target, "long": batch[0].text.long}
        arrays |= {"source": source, "length": known} if batch[0].length else {}
        arrays["adapters"] = self._selection_of(batch, count) if self.adapters else None
        if any(piece.pictures is not None for piece in batch):
            arrays |= self._picture_arrays(batch, count, length)
        self._caches.read(**arrays)

    def _selection_of(self, batch: Sequence[_Piece], count: int) -> np.ndarray:
        """The selection of each piece's adapter, in `count` rows."""
        return self.selection([*(self.rows[piece.target] for piece in batch), *[None] * (count - len(batch))])

    def _picture_arrays(self, batch: Sequence[_Piece], count: int, length: int) -> dict[str, Any]:
        """The arrays that pieces with pictures are read with, in `count` rows of `length` tokens."""
        arrays: dict[str, Any] = {"pictures": piece_arrays(batch, count, length)}
        if batch[0].features:
            numbers = [self.rows[piece.target].number for piece in batch]
            arrays["pictures_of"] = np.asarray([*numbers, *[numbers[0]] * (count - len(batch))], np.int32)
        return arrays
