"""One model on several devices: who computes when, and how several processes compute the same.

The devices of a mesh exchange parts of every product, so all of them must begin their programs in one order: threads
that share a mesh take turns. In several processes, process 0 has the requests, the queue and the clients. It announces
every call that reaches the devices, with its arguments, and the other processes (`follow`) repeat it. So all processes
run the same programs on the same numbers, whatever process 0 decided them from.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from meshtune.generate.programs import Feed, Knobs, Switches
from meshtune.generate.target_log_probs import TargetText
from meshtune.mesh.processes import SINGLE_PROCESS, Job

if TYPE_CHECKING:
    from meshtune.generate.weights import BatchCaches

TAG = "generation"
FOREVER = 1e9  # seconds: a server may wait for its next request as long as it likes
RECORDS: dict[str, type] = {kind.__name__: kind for kind in (Feed, Knobs, TargetText, Switches)}


class Replica(Protocol):
    """A model as every process has it. `driver` is what orders its computations, on process 0."""

    @property
    def driver(self) -> Driver | None: ...

    def batch_caches(self) -> BatchCaches:
        """Caches of a new batch, which are not announced."""
        ...

    def repeat(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Computes what process 0 computes, for the sake of the devices only."""
        ...


class Driver:
    """Lets one thread at a time compute, after telling the other processes of `job` the computation."""

    def __init__(self, job: Job = SINGLE_PROCESS):
        self._job, self._lock = job, threading.RLock()
        self._numbers, self._ended = itertools.count(), list[int]()

    def new_batch(self, caches: BatchCaches, model: int) -> int:
        """Announces the caches of a new batch of this model; returns their number."""
        number = next(self._numbers)
        with self.announce({"new batch": number, "model": model}):
            pass
        weakref.finalize(caches, self._ended.append, number)
        return number

    @contextlib.contextmanager
    def announce(self, message: Mapping[str, object], arguments: Mapping[str, object] | None = None) -> Iterator[None]:
        """Announces what the block computes, and keeps other threads from computing meanwhile."""
        with self._lock:
            if self._job.process_count > 1:
                ended = [self._ended.pop() for _ in range(len(self._ended))]
                self._job.broadcast(TAG, {**message, "arguments": encode(arguments), "ended": ended}, timeout=FOREVER)
            yield

    def end(self) -> None:
        """Lets the other processes go."""
        with self.announce({"end": True}):
            pass


def driver_for(job: Job, replicas: Sequence[Replica]) -> Driver:
    """The driver of one more model: that of `replicas`, or a new one."""
    driver = replicas[0].driver if replicas else None
    return driver or Driver(job if job.is_main_process else SINGLE_PROCESS)


def announce(driver: Driver | None, model: int, call: str, **arguments: object) -> AbstractContextManager[None]:
    """Announces a call of a model that no batch belongs to. Without a driver nothing is ordered."""
    if driver is None:
        return contextlib.nullcontext()
    return driver.announce({"model": model, "call": call}, arguments)


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
    while "end" not in (message := job.broadcast(TAG, None, timeout=FOREVER)):
        for number in message["ended"]:
            batches.pop(number, None)
        if "new batch" in message:
            batches[message["new batch"]] = models[message["model"]].batch_caches()
        elif "batch" in message:
            arguments = decode(message["arguments"])
            getattr(batches[message["batch"]], message["call"])(**arguments)
        else:
            models[message["model"]].repeat(message["call"], decode(message["arguments"]))


def encode(value: Any) -> Any:
    """A value as JSON: numbers, texts, arrays in host memory or on this process's devices, and dataclasses of
    RECORDS."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return {"array": base64.b64encode(array.tobytes()).decode(), "dtype": str(array.dtype), "shape": array.shape}
    if dataclasses.is_dataclass(value):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        assert type(value).__name__ in RECORDS, value
        return {"record": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"mapping": {name: encode(item) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def decode(value: Any) -> Any:
    """The value of its JSON form; sequences come back as tuples."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        numbers = np.frombuffer(base64.b64decode(value["array"]), value["dtype"])
        return numbers.reshape(value["shape"])
    if "record" in value:
        return RECORDS[value["record"]](**{name: decode(item) for name, item in value["fields"].items()})
    return {name: decode(item) for name, item in value["mapping"].items()}
