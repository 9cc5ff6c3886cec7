"""Continuous batching: requests wait in a queue, take a row of the batch as one gets free, and leave it when they end.

All rows decode together, each at its length. Prompts are read between decode steps, in pieces if they are
long, and from where another row has read the same tokens before (generate.rows).
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from meshtune.errors import UserError
from meshtune.generate.config import Sampling
from meshtune.generate.constraint import packed_masks
from meshtune.generate.driver import BatchCaches
from meshtune.generate.long_context import original_context
from meshtune.generate.programs import STEPS, Decoded, Feed
from meshtune.generate.request import FinishReason, Generation, GenerationRequest, Token
from meshtune.generate.rows import Row, Rows
from meshtune.generate.sampling import Probabilities, compiled_form
from meshtune.generate.weights import Weights
from meshtune.model.spec import ModelSpec

READ_TOKENS = 512  # of prompts, that a step reads at most while rows decode, so that they soon decode again
READ_TOKENS_IDLE = 4096  # and while none does, so that requests that come meanwhile soon begin
ALTERNATIVES = (0, 5, 20)  # likeliest tokens that a program is compiled for


class QueueFull(UserError):
    """More requests wait than the queue may hold."""


class Progress(NamedTuple):
    """The new tokens of a generation in one step, and why it ended with them (None: it has not)."""

    generation: Generation
    tokens: list[Token]
    finish_reason: FinishReason | None


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
        self._most_rows, self._most_waiting = rows, queue
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
    def capacity(self) -> int | None:
        """Requests that it takes at once, at most; None: any number."""
        return None if self._most_waiting is None else self._most_rows + self._most_waiting

    @property
    def room(self) -> int | None:
        """Requests that it takes now; None: any number."""
        if self.capacity is None:
            return None
        return (
            self.capacity - len(self._waiting) - sum(generation.finish_reason is None for generation in self._current)
        )

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
            return not self._waiting and not self.running

    def step(self, steps: int = STEPS) -> list[Progress]:
        """Lets waiting requests in, reads prompts, decodes at most `steps` tokens of every row whose prompt is read.

        Returns the progress of each generation that has new tokens, or ended."""
        self._clock += 1
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
        """Gives free rows to waiting requests; returns those whose grammar cannot be followed."""
        running = [row.generation for row in self._rows.rows if row.generation is not None]
        with self._lock:
            chosen = self._choose_requests(self._most_rows - len(running))
            self._current = [*running, *chosen]
        admitted, refused = [], []
        for generation in chosen:
            try:
                generation.start()
                admitted.append(generation)
            except UserError as problem:
                generation.error, generation.finish_reason = problem, "error"
                refused.append(Progress(generation, [], "error"))
        if not admitted:
            return refused
        self._rows.make_room(admitted)
        for generation in admitted:
            self._rows.place(generation, self._clock)
        self._caches.counts = None  # counted again for all rows where a processor reads them
        return refused

    def _choose_requests(self, free: int) -> list[Generation]:
        """The next requests: the oldest of the client that has the fewest rows."""
        running = Counter(row.generation.request.client for row in self._rows.rows if row.generation is not None)
        chosen = []
        while self._waiting and len(chosen) < free:
            following = min(self._waiting, key=lambda generation: running[generation.request.client])
            self._waiting.remove(following)
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
        masks = packed_masks(constraints, self._spec.vocab)
        # What a grammar allows is known only once the token before is.
        remaining = [self._rows.remaining(row) for row in rows]
        steps = 1 if masks.size else min(steps, max(remaining))
        longest = max(len(row.cached.tokens) + min(steps, remaining[n]) for n, row in live)
        if longest > self._rows.slots:
            self._rows.resize(len(rows), longest)
            assert all(row is self._rows.rows[n] for n, row in live), "rows that decode stay where they are"
        switches, knobs = compiled_form([request.sampling if request else Sampling() for request in requests], masks)
        asked = [r.alternatives for r in requests if r is not None and r.alternatives is not None]
        alternatives = next((n for n in ALTERNATIVES if n >= max(asked)), max(asked)) if asked else None
        counts = self._caches.counts
        if counts is None or (switches.counts and not counts.generated.shape[1]):
            self._count(self._spec.vocab if switches.counts else 0)
        decoded = self._caches.decode(
            feed=self._feed(remaining),
            knobs=knobs,
            steps=steps,
            leave=self.waiting > 0,
            switches=switches,
            alternatives=alternatives,
            adapters=self._rows.selection(rows),
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
        arrays: dict[str, Any] = {name: np.asarray(column, np.int32) for name, column in columns.items()}
        return Feed(**arrays)

    def _count(self, vocab: int) -> None:
        """Counts the tokens of all rows."""
        generations = [row.generation if vocab else None for row in self._rows.rows]
        prompts = [generation.request.prompt if generation else () for generation in generations]
        self._caches.count(prompts=prompts, generated=[g.ids if g else () for g in generations], vocab=vocab)

    def _extend(self, n: int, row: Row, decoded: Decoded) -> Progress:
        """Gives a row's new tokens to its generation, which may end with them."""
        generation = row.generation
        assert generation is not None
        ids = [token for token in decoded.tokens[n].tolist() if token >= 0]
        row.cached.tokens += [generation.newest, *ids[:-1]]
        new = [_token(id_, n, i, decoded.probabilities, generation.request) for i, id_ in enumerate(ids)]
        reason = generation.extend(new)
        if not decoded.finite[n]:
            generation.error = UserError(
                f"the model's logits are not finite near new token {len(generation.tokens) - 1}",
                fix="the weights overflow in this dtype (try float32), or hold NaN or infinity",
            )
            reason = "error"
            self._rows.restart([row])
        if reason is not None:
            self._end(generation, reason)
        return Progress(generation, new, generation.finish_reason)


def _token(id_: int, row: int, step: int, probabilities: Probabilities | None, request: GenerationRequest) -> Token:
    if probabilities is None or request.alternatives is None:
        return Token(id_)
    likeliest = zip(probabilities.tokens[row, step].tolist(), probabilities.likeliest[row, step].tolist(), strict=True)
    return Token(id_, float(probabilities.chosen[row, step]), tuple(likeliest)[: request.alternatives])
