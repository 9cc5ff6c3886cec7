"""Continuous batching: requests wait in a queue, take a row of the batch, and leave it when they end.

All rows decode together, each at its length. Prompts are read between decode steps, in pieces, so that a long one does
not keep other rows from decoding.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import NoReturn

import jax
import numpy as np
from jaxtyping import UInt32

from meshtune.errors import UserError
from meshtune.generate.long_context import original_context
from meshtune.generate.programs import STEPS, Decoded, Feed, compiled_form
from meshtune.generate.request import (
    Constraint,
    FinishReason,
    Generation,
    GenerationRequest,
    Progress,
    QueueFull,
    Sampling,
    Token,
    mask_words,
)
from meshtune.generate.rows import Row, Rows
from meshtune.generate.visual import feed_columns
from meshtune.generate.weights import BatchCaches, Weights
from meshtune.model.spec import ModelSpec

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

    `rows` requests are computed at once, at most; `queue` more may wait (None: any number). With `interactive` a step
    reads a part of long prompts, and rows that decode go on meanwhile; else it reads all of them first.
    Once the `weights` are replaced, nothing that its `caches` hold is used again: the texts of requests under way are
    read again.
    """

    def __init__(
        self,
        weights: Weights,
        caches: BatchCaches,
        spec: ModelSpec,
        *,
        rows: int = 8,
        queue: int | None = None,
        interactive: bool = False,
    ):
        self._weights, self._version = weights, weights.version
        self._spec = spec
        self._most_rows = rows
        self.capacity = None if queue is None else rows + queue  # requests that it takes at once; None: any number
        self._lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._cancelled: list[Generation] = []
        self._caches = caches
        self._rows = Rows(caches, weights.adapters, original_context(spec), interactive)
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
            self._rows.read()
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
