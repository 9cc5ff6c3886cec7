"""One model on several devices: who computes when, and how several processes compute the same.

The devices of a mesh exchange parts of every product, so all of them must begin their programs in one order: threads
that share a mesh take turns. In several processes, process 0 has the requests, the queue and the clients. It announces
every call that reaches the devices, with its arguments, and the other processes (`follow`) repeat it. So all processes
run the same programs on the same numbers, whatever process 0 decided them from.

Announcements are sums over the devices, to which the others contribute zeros. A process that waits for one occupies its
device, and JAX's Gloo, which joins CPUs, waits for half a minute only: so after IDLE seconds without one the others are
told to wait for a message of the coordinator instead.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from meshtune.generate.programs import Feed, Knobs, Switches
from meshtune.generate.target_log_probs import TargetText
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.weights.tensor_reader import SMALLEST, BroadcastReader, broadcast_reader, neighbours

if TYPE_CHECKING:
    from meshtune.generate.weights import BatchCaches

TAG = "generation"
FOREVER = 1e9  # seconds: a server may wait for its next request as long as it likes
IDLE = 3.0  # seconds without an announcement after which the other processes leave their devices
LENGTH = 8  # bytes of the length before an announcement
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
        self._channel: Channel | None = None
        self._over = False
        self._listened, self._last = False, 0.0  # whether the others wait at their devices, and since when

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
                self._send({**message, "arguments": encode(arguments), "ended": ended})
            yield
            self._last = time.monotonic()

    def _send(self, message: Mapping[str, object]) -> None:
        if self._channel is None:
            self._channel = Channel()
            threading.Thread(target=self._release, name="meshtune-idle", daemon=True).start()
        if not self._listened:
            self._job.broadcast(TAG, None, timeout=FOREVER)
            self._listened = True
        self._channel.send(message)

    def _release(self) -> None:
        """Lets the other processes leave their devices whenever nothing was announced for a while."""
        assert self._channel is not None
        while not self._over:
            time.sleep(IDLE / 4)
            with self._lock:
                if self._listened and time.monotonic() - self._last > IDLE:
                    self._channel.send({"idle": True})
                    self._listened = False

    def end(self) -> None:
        """Lets the other processes go."""
        with self.announce({"end": True}):
            self._over, self._listened = True, False


class Channel:
    """Takes messages from process 0 to all others, over one device of each process."""

    def __init__(self) -> None:
        devices = jax.devices()
        reader, _ = broadcast_reader(devices, neighbours(devices))
        assert reader is not None
        self._reader: BroadcastReader = reader

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message from process 0; the others must call `receive`."""
        text = json.dumps(message).encode()
        content = np.frombuffer(len(text).to_bytes(LENGTH, "little") + text, np.uint8)
        first = np.zeros(SMALLEST, np.uint8)
        first[: content.size] = content[:SMALLEST]
        self._reader.broadcast(first, SMALLEST)
        if content.size > SMALLEST:
            self._reader.broadcast(content[SMALLEST:], content.size - SMALLEST)

    def receive(self) -> dict[str, Any]:
        """The next message of process 0."""
        content = self._reader.broadcast(None, SMALLEST).tobytes()
        size = LENGTH + int.from_bytes(content[:LENGTH], "little")
        if size > SMALLEST:
            content += self._reader.broadcast(None, size - SMALLEST).tobytes()
        return json.loads(content[LENGTH:size])


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
    channel = Channel()
    job.broadcast(TAG, None, timeout=FOREVER)
    while "end" not in (message := channel.receive()):
        if "idle" in message:
            job.broadcast(TAG, None, timeout=FOREVER)
            continue
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
