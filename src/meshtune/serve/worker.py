"""Runs an engine's scheduler in a thread of its own, and hands what it generates to asynchronous readers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator

from meshtune.generate.request import Generation, Request
from meshtune.generate.scheduler import Progress, Scheduler

LOG = logging.getLogger(__name__)
STEPS = 4  # tokens a row that readers get at once


class Worker:
    """A scheduler's thread. It sleeps while there is nothing to do."""

    def __init__(self, scheduler: Scheduler, name: str):
        self.scheduler = scheduler
        self.tokens: Counter[int | None] = Counter()  # generated, by the adapter that their requests select
        self.failure: Exception | None = None
        self._readers: dict[Generation, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Progress | Exception]]] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"generate {name}", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    async def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """What a request brings, step by step, until it ends. One that is not read to its end is cancelled.

        Raises QueueFull, UserError where the model overflows, and what ended the thread.
        """
        if self.failure is not None:
            raise self.failure
        queue: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        with self._changed:  # so that its first tokens find their reader
            generation = self.scheduler.submit(request)
            self._readers[generation] = (asyncio.get_running_loop(), queue)
            self._changed.notify()
        try:
            while True:
                new = await queue.get()
                if isinstance(new, Exception):
                    raise new
                if new.finish_reason == "error" and generation.error is not None:
                    raise generation.error
                yield new
                if new.finish_reason is not None:
                    return
        finally:
            with self._changed:
                self._readers.pop(generation, None)
                if generation.finish_reason is None:
                    self.scheduler.cancel(generation)
                self._changed.notify()

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""
        with self._changed:
            return bool(self._readers)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and self.scheduler.idle:
                    self._changed.wait()
                if self._stopping:
                    return
            try:
                new = self.scheduler.step(STEPS)
            except Exception as problem:  # out of memory, say: every reader hears of it, and later requests are refused
                LOG.exception("the generation of %s failed", self._thread.name)
                self.failure = problem
                self._fail(problem)
                return
            with self._changed:
                for progress in new:
                    self.tokens[progress.generation.request.adapter] += len(progress.tokens)
                    self._deliver(progress.generation, progress)

    def _deliver(self, generation: Generation, new: Progress | Exception) -> None:
        if (reader := self._readers.get(generation)) is not None:
            loop, queue = reader
            loop.call_soon_threadsafe(queue.put_nowait, new)

    def _fail(self, problem: Exception) -> None:
        with self._changed:
            for generation in list(self._readers):
                self._deliver(generation, problem)
