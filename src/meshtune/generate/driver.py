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
import functools
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int

from meshtune.arrays.tree import Tree
from meshtune.generate import programs
from meshtune.generate.programs import Counts, Decoded, Feed, Knobs, Pictures, Switches, by_long_factors
from meshtune.generate.target_log_probs import TargetText
from meshtune.generate.weights import Weights
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

TAG = "generation"
FOREVER = 1e9  # seconds: a server may wait for its next request as long as it likes
RECORDS: dict[str, type] = {kind.__name__: kind for kind in (Feed, Knobs, TargetText, Switches)}
Numbers = Int[np.ndarray, "n"]
R = TypeVar("R")


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
                self._job.exchange(TAG, {**message, "arguments": encode(arguments), "ended": ended}, FOREVER)
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


def _announce_call(method: Callable[..., R]) -> Callable[..., R]:
    """The method, announced to other processes before it computes; its arguments are given by name."""

    @functools.wraps(method)
    def call(self: BatchCaches, **arguments: Any) -> R:
        message = {"batch": self.number, "call": method.__name__}
        with contextlib.nullcontext() if self.driver is None else self.driver.announce(message, arguments):
            result = method(self, **arguments)
            if jax.process_count() > 1 and jax.default_backend() == "cpu":
                jax.block_until_ready(self.layers)  # JAX's Gloo mixes up the messages of two programs at once
            return result

    return call


class BatchCaches:
    """The caches and token counts of the rows of one batch, changed by the compiled programs.

    Everything else that a step needs comes from the host as small arguments, so that several processes which are told
    the same arguments in the same order run the same programs. With a `driver` every call is announced to the other
    processes that share this model, number `model` of theirs.
    """

    def __init__(
        self, weights: Weights, spec: ModelSpec, compute: Compute, driver: Driver | None = None, model: int = 0
    ):
        self.weights, self._spec, self._compute = weights, spec, compute
        self.driver = driver
        self.number = 0 if driver is None else driver.new_batch(self, model)
        self.layers: dict[str, Tree] = {}
        self.counts: Counts | None = None
        self.features: dict[int, Tree] = {}

    @_announce_call
    def create(self, rows: int, slots: int) -> None:
        """Makes empty caches of `rows` rows of `slots` tokens."""
        self.layers = programs.empty_layers(self._spec, self._compute, rows, slots)

    @_announce_call
    def move(self, source: Numbers, slots: int) -> None:
        """Keeps the caches of the rows `source` only, in this order, with room for `slots` tokens."""
        self.layers = programs.move_rows(self.layers, source, spec=self._spec, compute=self._compute, slots=slots)

    @_announce_call
    def read(
        self,
        tokens: np.ndarray,
        count: Numbers,
        target: Numbers,
        adapters: np.ndarray | None,
        long: bool,
        source: Numbers | None = None,
        length: Numbers | None = None,
        visual: np.ndarray | None = None,
        pictures_of: Numbers | None = None,
        rope_positions: np.ndarray | None = None,
        reach: np.ndarray | None = None,
    ) -> None:
        """See programs.read; `long`: the texts are longer than the original context (generate.long_context). `visual`
        indexes the features of the rows `pictures_of`."""
        options = {"spec": by_long_factors(self._spec) if long else self._spec, "compute": self._compute}
        arrays = (tokens, count, target, source, length)
        features = () if pictures_of is None else tuple(self.features[int(row)] for row in pictures_of)
        indices: Any = (visual, rope_positions, reach)
        pictures = Pictures(features, *indices)
        self.layers = programs.read(self.weights.reading, self.layers, *arrays, pictures, adapters=adapters, **options)

    @_announce_call
    def encode(
        self, row: int, patches: np.ndarray, segments: Numbers, grid: np.ndarray, adapters: np.ndarray | None
    ) -> int:
        """Computes the features of the pictures of a row's request; returns the places for features."""
        arrays = programs.pad_patches(self._spec, patches, segments, grid)
        self.features[row] = programs.encode(
            self.weights.reading, *arrays, spec=self._spec, compute=self._compute, adapters=adapters
        )
        return jax.tree.leaves(self.features[row])[0].shape[1]

    @_announce_call
    def forget(self, rows: Numbers) -> None:
        """Frees the features of the pictures of these rows' requests."""
        for row in rows:
            self.features.pop(int(row), None)

    def holds_every_token(self, slots: int) -> bool:
        """See programs.holds_every_token, of these caches with `slots` tokens a row."""
        return programs.holds_every_token(self._spec, self._compute, slots)

    @_announce_call
    def count(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], vocab: int) -> None:
        """Counts the tokens of all rows, those of prompts and those generated since; with a `vocab` of 0 nothing."""
        in_prompt: Any = np.zeros((len(prompts), vocab), bool)
        times: Any = np.zeros((len(prompts), vocab), np.int32)
        if vocab:
            for row, (prompt, ids) in enumerate(zip(prompts, generated, strict=True)):
                in_prompt[row, list(prompt)] = True
                np.add.at(times[row], list(ids), 1)
        self.counts = Counts(in_prompt, times)

    @_announce_call
    def decode(
        self,
        feed: Feed,
        knobs: Knobs,
        steps: int,
        leave: bool,
        switches: Switches,
        alternatives: int | None,
        adapters: Float[np.ndarray, "B N"] | None,
    ) -> Decoded:
        """See programs.decode; `count` comes first."""
        assert self.counts is not None
        self.layers, self.counts, decoded = programs.decode(
            self.weights.decoding,
            self.layers,
            self.counts,
            feed,
            knobs,
            np.int32(steps),
            np.bool_(leave),
            spec=self._spec,
            compute=self._compute,
            switches=switches,
            alternatives=alternatives,
            adapters=adapters,
        )
        return decoded


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
