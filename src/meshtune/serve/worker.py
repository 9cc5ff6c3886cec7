"""Runs an engine's scheduler in a thread, and hands its tokens to asynchronous readers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator

import jax

from meshtune.generate.request import Generation, GenerationRequest
from meshtune.generate.scheduler import Progress, Scheduler

LOG = logging.getLogger(__name__)
STEPS = 4  # tokens a row that readers get at once
FAILURES = 3  # steps in a row that raise an error before the model is said to have failed


class Worker:
    """A scheduler's thread. It sleeps while there is nothing to do."""

    def __init__(self, scheduler: Scheduler, name: str):
        self.scheduler = scheduler
        self.tokens: Counter[int | None] = Counter()  # generated, by the adapter that their requests select
        self.ended: Exception | None = None  # the thread, by this error
        self._failures = 0
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

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Progress]:
        """Yields the progress of a request, step by step, until it ends. One that is not read to its end is cancelled.

        Raises QueueFull, UserError where the model overflows, and the error that ended the thread.
        """
        if self.ended is not None:
            raise self.ended
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
    def failed(self) -> bool:
        """Whether the latest steps have all raised errors, or the thread has ended by one."""
        return self.ended is not None or self._failures >= FAILURES

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
            except BaseException as problem:  # a panic in Rust is no Exception
                LOG.exception("a step of %s failed", self._thread.name)
                self._recover(problem if isinstance(problem, Exception) else RuntimeError(str(problem)))
                if self.ended is not None:
                    return
                continue
            self._failures = 0
            with self._changed:
                for progress in new:
                    self.tokens[progress.generation.request.adapter] += len(progress.tokens)
                    self._deliver(progress.generation, progress)

    def _deliver(self, generation: Generation, new: Progress | Exception) -> None:
        if (reader := self._readers.get(generation)) is not None:
            loop, queue = reader
            loop.call_soon_threadsafe(queue.put_nowait, new)

    def _recover(self, problem: Exception) -> None:
        """Tells the requests of a step why it failed. Of several processes the others may still compute the step, so
        that nothing can be computed with them any more."""
        self._failures += 1
        failed = self.scheduler.recover()
        with self._changed:
            if jax.process_count() > 1:
                self.ended, failed = problem, list(self._readers)
            for generation in failed:
                self._deliver(generation, problem)
