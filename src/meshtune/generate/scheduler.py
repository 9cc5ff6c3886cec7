"""Continuous batching: requests wait in a queue, take a row of the batch as one gets free, and leave it when they end.

All rows decode together, each at a length of its own. What a row holds stays until another request needs the row, so a
prompt that begins as one that was read before (a system prompt, a conversation that goes on, several samples of one
prompt) is read from there on.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.generate import programs
from meshtune.generate.config import Sampling
from meshtune.generate.constraint import packed_masks
from meshtune.generate.programs import STEPS, Decoded, Feed, length_bucket, rows_bucket
from meshtune.generate.request import FinishReason, Generation, Request, Token
from meshtune.generate.sampling import Counts, Probabilities, compiled_form
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

ROOM = 512  # slots made at first for tokens to come; a longer text lets the cache grow
FEWEST_SLOTS = 128  # then powers of two: empty slots cost little, another length costs a compilation
SHORTEST_SHARED = 16  # tokens at least that are not read again where another row has them
ALTERNATIVES = (0, 5, 20)  # likeliest tokens that a program is compiled for


class QueueFull(UserError):
    """More requests wait than the queue may hold."""


class Progress(NamedTuple):
    """What one step brought a generation, and why it ended with that (None: it goes on)."""

    generation: Generation
    tokens: list[Token]
    finish_reason: FinishReason | None


@dataclasses.dataclass(eq=False)
class _Row:
    """A row of the batch: the tokens that its cache holds, the newest one, which is not in it yet, and whose it is."""

    cached: list[int] = dataclasses.field(default_factory=list)
    newest: int = 0
    generation: Generation | None = None
    last_used: int = 0


class _Admission(NamedTuple):
    """A request that gets row `target`: `length` tokens of its prompt are in the cache of row `source` already."""

    generation: Generation
    target: int
    source: int
    length: int

    @property
    def unread(self) -> tuple[int, ...]:
        """The tokens to read: the prompt's, but for the last, which the first decode step reads."""
        return self.generation.request.prompt[self.length : -1]

    @property
    def is_read(self) -> bool:
        """Whether the row holds the prompt as it is. (One that is empty may hold another request's state.)"""
        return self.length > 0 and self.source == self.target and not self.unread


class Scheduler:
    """A queue and the rows of one batch. `submit` and `cancel` may be called from any thread, `step` from one.

    `rows` requests are computed at once, at most; `queue` more may wait (None: any number).
    """

    def __init__(self, params: Tree, spec: ModelSpec, compute: Compute, *, rows: int = 8, queue: int | None = None):
        self._params, self._spec, self._compute = params, spec, compute
        self._most_rows, self._most_waiting = rows, queue
        self._lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._cancelled: list[Generation] = []
        self._rows: list[_Row] = []
        self._slots = 0
        self._layers: dict[str, Tree] = {}
        self._counts: Counts | None = None
        self._clock = 0

    def submit(self, request: Request) -> Generation:
        """Puts a request into the queue. Raises QueueFull."""
        with self._lock:
            if self._most_waiting is not None and len(self._waiting) >= self._most_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait already", fix="try again in a while")
            generation = Generation(request)
            self._waiting.append(generation)
            return generation

    def cancel(self, generation: Generation) -> None:
        """Ends a generation before its next step, for reasons that only its reader sees."""
        with self._lock:
            self._cancelled.append(generation)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(row.generation is not None for row in self._rows)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        with self._lock:
            return not self._waiting and not self.running

    def step(self, steps: int = STEPS) -> list[Progress]:
        """Lets waiting requests in, decodes at most `steps` tokens of every row, and returns what is new of each
        generation that has something new, or ended."""
        self._clock += 1
        self._drop_cancelled()
        self._admit()
        return self._decode(max(1, min(steps, STEPS)))

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
        for row in self._rows:
            if row.generation is generation:
                row.generation, row.last_used = None, self._clock

    # Admission

    def _admit(self) -> None:
        """Gives free rows to waiting requests and reads their prompts."""
        with self._lock:
            admitted = self._chosen(self._most_rows - self.running)
        if not admitted:
            return
        self._make_room(admitted)
        batch: list[_Admission] = []
        for generation in admitted:
            admission = self._placed(generation)
            shares = any(admission.source == earlier.target for earlier in batch)
            if batch and (shares or _shape(admission) != _shape(batch[0])):
                self._read(batch)
                batch = []
            batch.append(admission)
            row = self._rows[admission.target]
            row.cached = list(generation.request.prompt[:-1])
            row.newest, row.generation, row.last_used = generation.request.prompt[-1], generation, self._clock
        self._read(batch)
        self._counts = None  # made anew for all rows where a processor reads it

    def _chosen(self, free: int) -> list[Generation]:
        """The next requests: the oldest of the client that has the fewest rows."""
        running = Counter(row.generation.request.client for row in self._rows if row.generation is not None)
        chosen = []
        while self._waiting and len(chosen) < free:
            following = min(self._waiting, key=lambda generation: running[generation.request.client])
            self._waiting.remove(following)
            running[following.request.client] += 1
            chosen.append(following)
        return chosen

    def _make_room(self, admitted: Sequence[Generation]) -> None:
        """Makes rows and slots for requests: as few rows as do, for every row costs time in every step."""
        count = rows_bucket(self.running + len(admitted))
        longest = max(len(g.request.prompt) + min(g.request.max_tokens, ROOM) for g in admitted)
        if not self.running and 4 * longest <= self._slots:
            self._rows, self._slots = [], 0
        self._resize(count, longest)

    def _resize(self, count: int, length: int) -> None:
        """Rows for `count` generations at least, of `length` tokens at least. Empty rows go first, the oldest first."""
        slots = max(FEWEST_SLOTS, self._slots, 1 << (length - 1).bit_length())
        count = count if count > len(self._rows) or 4 * count <= len(self._rows) else len(self._rows)
        if slots == self._slots and count == len(self._rows):
            return
        retained = sorted(self._rows, key=lambda row: (row.generation is None, -row.last_used))[:count]
        if retained:
            source = [self._rows.index(row) for row in retained]
            source += [0] * (count - len(retained))
            self._layers = programs.moved(
                self._layers, np.asarray(source, np.int32), spec=self._spec, compute=self._compute, slots=slots
            )
        else:
            self._layers = programs.empty_layers(self._spec, self._compute, count, slots)
        self._rows = retained + [_Row() for _ in range(count - len(retained))]
        self._slots, self._counts = slots, None

    def _placed(self, generation: Generation) -> _Admission:
        """A free row for a request, and the row whose cache has most of its prompt."""
        prompt = generation.request.prompt[:-1]
        shared = [self._shared(row.cached, prompt) for row in self._rows]
        source = max(range(len(shared)), key=shared.__getitem__)
        length = shared[source] if shared[source] >= min(SHORTEST_SHARED, len(prompt)) else 0
        free = [n for n, row in enumerate(self._rows) if row.generation is None]
        if length and source in free and length == len(self._rows[source].cached):
            return _Admission(generation, source, source, length)  # goes on where it ended
        targets = [n for n in free if n != source] or free
        target = min(targets, key=lambda n: (len(self._rows[n].cached) > 0, self._rows[n].last_used))
        return _Admission(generation, target, source if length else target, length)

    def _shared(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """How many of the tokens of `prompt` need not be read where a row holds `cached`."""
        common = next(
            (n for n, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), min(len(cached), len(prompt))
        )
        whole = common == len(cached) or programs.holds_every_token(self._spec, self._compute, self._slots)
        return common if whole else 0

    def _read(self, batch: Sequence[_Admission]) -> None:
        """Reads the prompts of requests of one shape."""
        batch = [admission for admission in batch if not admission.is_read]
        if not batch:
            return
        count, length = rows_bucket(len(batch)), _shape(batch[0])[1]
        tokens, unread = np.zeros((count, length), np.int32), np.zeros(count, np.int32)
        source, known = np.zeros(count, np.int32), np.zeros(count, np.int32)
        target = np.full(count, len(self._rows), np.int32)  # beyond the end: dropped
        for n, admission in enumerate(batch):
            unread[n] = len(admission.unread)
            tokens[n, : unread[n]] = admission.unread
            source[n], known[n], target[n] = admission.source, admission.length, admission.target
        static = {"spec": self._spec, "compute": self._compute}
        if batch[0].length:
            self._layers = programs.read_on(self._params, self._layers, tokens, unread, source, known, target, **static)
        else:
            self._layers = programs.read_new(self._params, self._layers, tokens, unread, target, **static)

    # Decoding

    def _decode(self, steps: int) -> list[Progress]:
        live = [(n, row) for n, row in enumerate(self._rows) if row.generation is not None]
        if not live:
            return []
        requests = [row.generation.request if row.generation else None for row in self._rows]
        constraints = [row.generation.constraint if row.generation else None for row in self._rows]
        masks = packed_masks(constraints, self._spec.vocab)
        # What a grammar allows is known only once the token before is.
        steps = 1 if masks.size else min(steps, max(_remaining(row) for _, row in live))
        longest = max(len(row.cached) for _, row in live)
        if longest + steps > self._slots:
            self._resize(len(self._rows), longest + steps)
        switches, knobs = compiled_form([request.sampling if request else Sampling() for request in requests], masks)
        requested = [r.alternatives for r in requests if r is not None and r.alternatives is not None]
        alternatives = next((n for n in ALTERNATIVES if n >= max(requested)), max(requested)) if requested else None
        if self._counts is None or (switches.counts and not self._counts.generated.shape[1]):
            self._counts = self._counted(self._spec.vocab if switches.counts else 0)
        self._layers, self._counts, decoded = programs.decode(
            self._params,
            self._layers,
            self._counts,
            self._feed(),
            knobs,
            np.int32(steps),
            np.bool_(self.waiting > 0),
            spec=self._spec,
            compute=self._compute,
            switches=switches,
            alternatives=alternatives,
        )
        decoded = jax.tree.map(np.asarray, decoded)
        return [self._advanced(n, row, decoded) for n, row in live]

    def _feed(self) -> Feed:
        stop_ids = [row.generation.request.stop_ids if row.generation else frozenset() for row in self._rows]
        width = max(8, -(-max(map(len, stop_ids)) // 8) * 8)  # so that their number rarely compiles anew
        columns = {
            "token": [row.newest for row in self._rows],
            "length": [len(row.cached) for row in self._rows],
            "remaining": [_remaining(row) for row in self._rows],
            "stop_ids": [sorted(ids) + [-1] * (width - len(ids)) for ids in stop_ids],
        }
        arrays: dict[str, Any] = {name: np.asarray(column, np.int32) for name, column in columns.items()}
        return Feed(**arrays)

    def _counted(self, vocab: int) -> Counts:
        """The tokens of all rows, counted."""
        prompted: Any = np.zeros((len(self._rows), vocab), bool)
        generated: Any = np.zeros((len(self._rows), vocab), np.int32)
        if vocab:
            for n, row in enumerate(self._rows):
                if row.generation is not None:
                    prompted[n, list(row.generation.request.prompt)] = True
                    np.add.at(generated[n], row.generation.ids, 1)
        return Counts(prompted, generated)

    def _advanced(self, n: int, row: _Row, decoded: Decoded) -> Progress:
        """Gives a row's new tokens to its generation, which may end with them."""
        generation = row.generation
        assert generation is not None
        ids = [token for token in decoded.tokens[n].tolist() if token >= 0]
        new = [_token(id_, n, i, decoded.probabilities, generation.request) for i, id_ in enumerate(ids)]
        row.cached += [row.newest, *ids[:-1]]
        row.newest = ids[-1]
        reason = generation.extended(new)
        if not decoded.finite[n]:
            generation.error = UserError(
                f"the model's logits are not finite near new token {len(generation.tokens) - 1}",
                fix="the weights overflow in this dtype (try float32), or hold NaN or infinity",
            )
            row.cached = []
            self._end(generation, "error")
        elif reason is not None:
            self._end(generation, reason)
        return Progress(generation, new, generation.finish_reason)


def _remaining(row: _Row) -> int:
    """Tokens that may still be generated in a row."""
    return 0 if row.generation is None else row.generation.request.max_tokens - len(row.generation.tokens)


def _shape(admission: _Admission) -> tuple[bool, int]:
    """Admissions of one shape are read together: whether a row goes on, and the bucket of the tokens to read."""
    return admission.length > 0, length_bucket(max(1, len(admission.unread)))


def _token(id_: int, row: int, step: int, probabilities: Probabilities | None, request: Request) -> Token:
    if probabilities is None or request.alternatives is None:
        return Token(id_)
    likeliest = zip(probabilities.tokens[row, step].tolist(), probabilities.likeliest[row, step].tolist(), strict=True)
    return Token(id_, float(probabilities.chosen[row, step]), tuple(likeliest)[: request.alternatives])
