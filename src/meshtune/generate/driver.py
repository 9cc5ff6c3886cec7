"""One model on several devices: who computes when, and how several processes compute the same.

The devices of a mesh exchange parts of every product, so all of them must begin their programs in one order: threads
that share a mesh take turns. In several processes, process 0 has the requests, the queue and the clients. It announces
every call that reaches the devices, with its arguments, and the other processes (`follow`) repeat it. So all processes
run the same programs on the same numbers, whatever process 0 decided them from.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from meshtune.generate.messages import decode, encode
from meshtune.mesh.processes import SINGLE_PROCESS, Job

if TYPE_CHECKING:
    from meshtune.generate.batch_caches import BatchCaches

TAG = "generation"
FOREVER = 1e9  # seconds: a server may wait for its next request as long as it likes
Announced = AbstractContextManager[None]


class Replica(Protocol):
    """A model as every process has it. `driver` is what orders its computations, on process 0."""

    @property
    def driver(self) -> Driver | None: ...

    def batch_caches(self) -> BatchCaches:
        """Caches of a new batch, which are not announced."""
        ...

    def repeat(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Computes what process 0 computes, for the sake of the devices alone."""
        ...


class Driver:
    """Lets one thread at a time compute, after the other processes of `job` know what is computed."""

    def __init__(self, job: Job = SINGLE_PROCESS):
        self._job, self._lock = job, threading.RLock()
        self._numbers, self._ended = itertools.count(), list[int]()

    def new_batch(self, caches: BatchCaches, model: int) -> Callable[[str, Mapping[str, object]], Announced]:
        """Announces the caches of a new batch of this model; returns what announces their calls."""
        number = next(self._numbers)
        with self.announced({"new batch": number, "model": model}):
            pass
        weakref.finalize(caches, self._ended.append, number)
        return lambda call, arguments: self.announced({"batch": number, "call": call, "arguments": encode(arguments)})

    @contextlib.contextmanager
    def announced(self, message: Mapping[str, object]) -> Iterator[None]:
        """Announces what the block computes, and keeps other threads from computing meanwhile."""
        with self._lock:
            if self._job.process_count > 1:
                ended = [self._ended.pop() for _ in range(len(self._ended))]
                self._job.exchange(TAG, {**message, "ended": ended}, FOREVER)
            yield

    def end(self) -> None:
        """Lets the other processes go."""
        with self.announced({"end": True}):
            pass


def driver_for(job: Job, replicas: Sequence[Replica]) -> Driver:
    """What orders the computations of one more model: what orders those of `replicas`, or something new."""
    driver = replicas[0].driver if replicas else None
    return driver or Driver(job if job.is_main_process else SINGLE_PROCESS)


def in_turn(driver: Driver | None, model: int, call: str, **arguments: object) -> Announced:
    """Announces a call of a model that no batch belongs to. Without a driver nothing is ordered."""
    if driver is None:
        return contextlib.nullcontext()
    return driver.announced({"model": model, "call": call, "arguments": encode(arguments)})


def run_on_all(job: Job, models: Sequence[Replica], body: Callable[[], None]) -> None:
    """Runs `body` on process 0; the others repeat what it computes with the `models`, until it is done."""
    if not job.is_main_process:
        follow(job, models)
        return
    body()
    if (driver := models[0].driver) is not None:
        driver.end()


def follow(job: Job, models: Sequence[Replica]) -> None:
    """Repeats what process 0 computes with its `models`, of the same order.

    Signals that ask the job to end are process 0's to answer. Raises UserError if process 0 is lost.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    batches: dict[int, BatchCaches] = {}
    while "end" not in (message := job.exchange(TAG, None, FOREVER)[0]):
        for number in message["ended"]:
            batches.pop(number, None)
        if "new batch" in message:
            batches[message["new batch"]] = models[message["model"]].batch_caches()
        elif "batch" in message:
            arguments = decode(message["arguments"])
            getattr(batches[message["batch"]], message["call"])(**arguments)
        else:
            models[message["model"]].repeat(message["call"], decode(message["arguments"]))
