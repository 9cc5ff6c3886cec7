"""Continuous batching: requests wait in a queue, take a row of the batch, and leave it when they end.

All rows decode together, each at its length. Prompts are read between decode steps, in pieces, so that a long one does
not keep other rows from decoding. The cache of a row stays until another request needs the row, so a text that begins
as one that was read before is read from there on.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jaxtyping import UInt32

from meshtune.errors import UserError
from meshtune.generate.pictures import PromptPictures
from meshtune.generate.programs import (
    STEPS,
    Decoded,
    Feed,
    compiled_form,
    length_bucket,
    original_context,
)
from meshtune.generate.request import (
    FinishReason,
    Generation,
    GenerationRequest,
    Progress,
    QueueFull,
    Sampling,
    Token,
    mask_words,
)
from meshtune.generate.visual import feed_columns, piece_arrays
from meshtune.generate.weights import BatchCaches, Weights
from meshtune.model.model_cache import READ_ROWS, ROOM, rows_bucket, slots_bucket
from meshtune.model.spec import ModelSpec

SHORTEST_SHARED = 16  # tokens at least that are not read again where another row has them


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

    `pictures` are those of the text, if it has any. Embeddings of the tokens are features of those from number `first`
    on, which are arrays of `features` entries (0: no token has one).
    """

    target: int
    source: int
    length: int
    tokens: Sequence[int]
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
        return self.length > 0, length_bucket(max(1, len(self.tokens))), self.text.long, self.features, has_rope


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

    def read(self, budget: int) -> None:
        """Reads at most `most` tokens of texts, the oldest request's first."""
        if self._original is not None:
            self._restart_long(self._original)
        reading = [row for row in self.rows if row.generation is not None and not row.decodes]
        reading.sort(key=lambda row: row.number)
        while reading:
            pieces: list[_Piece] = []
            deferred: list[Row] = []
            for row in reading:
                piece = self._next_piece(row, budget)
                if piece is None or any(piece.source == earlier.target for earlier in pieces):
                    deferred.append(row)  # it waits for what another row reads first
                    continue
                if piece.tokens or piece.source != piece.target or not piece.length:  # an empty row may hold a state
                    pieces.append(piece)
                budget -= len(piece.tokens)
                read = piece.text.tokens[: piece.length + len(piece.tokens)]
                row.cached, row.started = dataclasses.replace(piece.text, tokens=read), True
            if not pieces:
                break
            # In their order: a row may be read from before another text takes its place.
            for _, group in itertools.groupby(pieces, lambda piece: piece.shape):
                batch = list(group)
                for start in range(0, len(batch), READ_ROWS):
                    self._compute(batch[start : start + READ_ROWS])
            reading = deferred
        if self._caches.features:
            self._forget_features()

    def _restart_long(self, original: int) -> None:
        """Lets texts that have become longer than the original context be read again, by the long factors."""
        short = [row for row in self.rows if row.decodes and not row.cached.long]
        self.restart([row for row in short if row.generation and row.generation.length > original])

    def _next_piece(self, row: Row, budget: int) -> _Piece | None:
        """The next tokens to read of a row's text, `most` at most; None where it has to wait."""
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
        piece = _Piece(target, self.rows.index(source or row), length, tokens, text)
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
        return piece._replace(tokens=tokens, pictures=pictures, first=first, features=features)

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


READ_TOKENS = 512  # of prompts, that a step reads at most while rows decode, so that they soon decode again
READ_TOKENS_IDLE = 4096  # and while none does, so that requests that come meanwhile soon begin
ALTERNATIVES = (0, 5, 20)  # likeliest tokens that a program is compiled for


def packed_masks(constraints: Sequence[Constraint | None], vocab: int) -> UInt32[np.ndarray, "B V/32"]:
    """The mask of every row; all tokens where a row has no constraint."""
    masks = np.full((len(constraints), mask_words(vocab)), 0xFFFFFFFF, np.uint32)
    for row, constraint in zip(masks, constraints, strict=True):
        if constraint is not None:
            row[:] = constraint.mask()
    return masks


class Scheduler:
    """A queue and the rows of one batch. `submit` and `cancel` may be called from any thread, `step` from one.

    `rows` requests are computed at once, at most; `queue` more may wait (None: any number). Once the `weights` are
    replaced, nothing that its `caches` hold is used again: the texts of requests under way are read again.
    """

    def __init__(
        self, weights: Weights, caches: BatchCaches, spec: ModelSpec, *, rows: int = 8, queue: int | None = None
    ):
        self._weights, self._version = weights, weights.version
        self._spec = spec
        self._most_rows = rows
        self.capacity = None if queue is None else rows + queue  # requests that it takes at once; None: any number
        self._lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._cancelled: list[Generation] = []
        self._caches = caches
        self._rows = Rows(caches, weights.adapters, original_context(spec))
        self._current: list[Generation] = []  # the requests of the step under way, or the last one
        self._clock = 0

    def submit(self, request: GenerationRequest) -> Generation:
        """Puts a request into the queue. Raises QueueFull."""
        assert request.adapter is None or request.adapter < self._rows.adapters, f"no adapter {request.adapter}"
        with self._lock:
            if self.room is not None and self.room < 1:
                self.refuse()
            generation = Generation(request)
            self._waiting.append(generation)
            return generation

    def refuse(self) -> NoReturn:
        """Raises QueueFull."""
        raise QueueFull(f"{len(self._waiting)} requests wait already", fix="try again in a while")

    def cancel(self, generation: Generation) -> None:
        """Ends a generation before its next step, for reasons that only its reader sees."""
        with self._lock:
            self._cancelled.append(generation)

    @property
    def room(self) -> int | None:
        """Requests that it takes now; None: any number."""
        current = sum(generation.finish_reason is None for generation in self._current)
        return None if self.capacity is None else self.capacity - len(self._waiting) - current

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return self._rows.running

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def running_of(self, adapter: int | None) -> int:
        """Requests that have a row and select this adapter (None: none)."""
        return sum(row.generation is not None and row.adapter == adapter for row in self._rows.rows)

    def waiting_of(self, adapter: int | None) -> int:
        """Requests in the queue that select this adapter (None: none)."""
        with self._lock:
            return sum(generation.request.adapter == adapter for generation in self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        with self._lock:
            return not self._waiting and not self._rows.running

    def step(self, steps: int = STEPS) -> list[Progress]:
        """Lets waiting requests in, reads prompts, decodes at most `steps` tokens of every row whose prompt is read.

        Returns the progress of each generation that has new tokens, or ended."""
        self._clock += 1
        if self._cancelled:
            self._drop_cancelled()
        with self._weights.use():
            if self._weights.version != self._version:
                self._rows.restart()
                self._version = self._weights.version
            refused = self._admit()
            self._rows.read(READ_TOKENS if any(row.decodes for row in self._rows.rows) else READ_TOKENS_IDLE)
            return refused + self._decode(max(1, min(steps, STEPS)))

    def recover(self) -> list[Generation]:
        """Ends the requests of a step that raised an error, and returns them; the others wait on. A step that had none
        ends all that wait."""
        with self._lock:
            failed, self._current = self._current, []
            if not failed:
                failed = list(self._waiting)
                self._waiting.clear()
            for generation in failed:
                generation.finish_reason = generation.finish_reason or "error"
            self._rows.clear()  # the step may have used up their memory
        return failed

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            for generation in cancelled:
                if generation.finish_reason is None:
                    if generation in self._waiting:
                        self._waiting.remove(generation)
                    self._end(generation, "cancelled")

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        generation.finish_reason = reason
        self._rows.end(generation, self._clock)

    # Admission

    def _admit(self) -> list[Progress]:
        """Gives free rows to waiting requests; returns those whose grammar allows nothing."""
        running = [row.generation for row in self._rows.rows if row.generation is not None]
        with self._lock:
            free = self._most_rows - len(running)
            chosen = self._choose_requests(free) if free < len(self._waiting) else list(self._waiting)
            self._waiting = deque(generation for generation in self._waiting if generation not in chosen)
            self._current = [*running, *chosen]
        refused = self._start_grammars(chosen) if any(g.request.grammar is not None for g in chosen) else []
        admitted = [generation for generation in chosen if generation.error is None]
        if not admitted:
            return refused
        self._rows.make_room(admitted)
        for generation in admitted:
            self._rows.place(generation, self._clock)
        self._caches.counts = None  # counted again for all rows where a processor reads them
        return refused

    def _start_grammars(self, chosen: Sequence[Generation]) -> list[Progress]:
        """Lets requests follow their grammars; returns those whose grammar allows nothing."""
        for generation in chosen:
            if (grammar := generation.request.grammar) is not None:
                generation.start(grammar)
        return [Progress(generation, [], "error") for generation in chosen if generation.error is not None]

    def _choose_requests(self, free: int) -> list[Generation]:
        """The next requests of more than there are rows for: the oldest of the client that has the fewest rows."""
        running = Counter(row.generation.request.client for row in self._rows.rows if row.generation is not None)
        chosen, waiting = [], list(self._waiting)
        while len(chosen) < free:
            following = min(waiting, key=lambda generation: running[generation.request.client])
            waiting.remove(following)
            running[following.request.client] += 1
            chosen.append(following)
        return chosen

    # Decoding

    def _decode(self, steps: int) -> list[Progress]:
        rows = self._rows.rows
        live = [(n, row) for n, row in enumerate(rows) if row.decodes]
        if not live:
            return []
        requests = [row.generation.request if row.generation else None for row in rows]
        constraints = [row.generation.constraint if row.generation else None for row in rows]
        masks = packed_masks(constraints, self._spec.vocab) if any(c is not None for c in constraints) else None
        remaining = [self._rows.remaining(row) for row in rows]
        # What a grammar allows is known only once the token before is.
        steps = min(steps, max(remaining)) if masks is None else 1
        longest = max(len(row.cached.tokens) + min(steps, remaining[n]) for n, row in live)
        if longest > self._rows.slots:
            self._rows.resize(len(rows), longest)
            assert all(row is self._rows.rows[n] for n, row in live), "rows that decode stay where they are"
        switches, knobs = compiled_form([request.sampling if request else Sampling() for request in requests], masks)
        (reports_drawn,) = {request.reports_drawn for request in requests if request is not None}  # all say the same
        switches = dataclasses.replace(switches, reports_drawn=reports_drawn)
        asked = [r.alternatives for r in requests if r is not None and r.alternatives is not None]
        alternatives = next((n for n in ALTERNATIVES if n >= max(asked)), max(asked)) if asked else None
        if switches.counts:
            self._count()
        decoded = self._caches.decode(
            feed=self._feed(remaining),
            knobs=knobs,
            steps=steps,
            leave=bool(self._waiting),
            switches=switches,
            alternatives=alternatives,
            adapters=self._rows.selection(rows) if self._rows.adapters else None,
        )
        decoded = jax.tree.map(np.asarray, decoded)
        return [self._extend(n, row, decoded) for n, row in live]

    def _feed(self, remaining: list[int]) -> Feed:
        rows = self._rows.rows
        stop_ids = [row.generation.request.stop_ids if row.generation else frozenset() for row in rows]
        width = max(8, -(-max(map(len, stop_ids)) // 8) * 8)  # so that their number rarely compiles a program
        columns = {
            "token": [row.generation.newest if row.generation else 0 for row in rows],
            "length": [len(row.cached.tokens) for row in rows],
            "remaining": remaining,
            "stop_ids": [sorted(ids) + [-1] * (width - len(ids)) for ids in stop_ids],
        }
        if any(row.generation and row.generation.request.pictures for row in rows):
            columns |= feed_columns([row.generation for row in rows], self._spec)
        return Feed(**{name: np.asarray(column, np.int32) for name, column in columns.items()})  # pyright: ignore

    def _count(self) -> None:
        """Counts the tokens of all rows, unless the caches have."""
        if self._caches.counts is not None and self._caches.counts.generated.shape[1]:
            return
        generations = [row.generation for row in self._rows.rows]
        prompts = [generation.request.prompt if generation else () for generation in generations]
        generated = [generation.ids if generation else () for generation in generations]
        self._caches.count(prompts=prompts, generated=generated, vocab=self._spec.vocab)

    def _extend(self, n: int, row: Row, decoded: Decoded) -> Progress:
        """Gives a row's new tokens to its generation, which may end with them."""
        generation = row.generation
        assert generation is not None
        ids = [token for token in decoded.tokens[n].tolist() if token >= 0]
        row.cached.tokens += [generation.newest, *ids[:-1]]
        scored = generation.request.alternatives is not None
        new = _scored_tokens(ids, n, decoded, generation.request) if scored else [Token(id_) for id_ in ids]
        reason = generation.extend(new)
        if not decoded.finite[n]:
            generation.error, reason = _overflow_error(generation), "error"
            self._rows.restart([row])
        if reason is not None:
            self._end(generation, reason)
        return Progress(generation, new, generation.finish_reason)


def _overflow_error(generation: Generation) -> UserError:
    return UserError(
        f"the model's logits are not finite near new token {len(generation.tokens) - 1}",
        fix="the weights overflow in this dtype (try float32), or hold NaN or infinity",
    )


def _scored_tokens(ids: Sequence[int], row: int, decoded: Decoded, request: GenerationRequest) -> list[Token]:
    """New tokens of a row with their log-probabilities, and as many of the likeliest ones as the request wants."""
    probabilities, tokens = decoded.probabilities, list[Token]()
    assert probabilities is not None, "a row asks for them"
    for step, id_ in enumerate(ids):
        place = row, step
        likeliest = zip(probabilities.tokens[place].tolist(), probabilities.likeliest[place].tolist(), strict=True)
        tokens.append(Token(id_, float(probabilities.chosen[place]), tuple(likeliest)[: request.alternatives]))
    return tokens
