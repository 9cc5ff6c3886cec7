"""What happens in a run, as plain data, and where it goes: the loop emits events, sinks show or keep them.

A sink is one file here (progress, metrics_log, plot, trackers). It never changes the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Started:
    """The loop begins: `done` updates of `total` were made before."""

    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Stepped:
    """Update number `step` (from 1) was made.

    `loss`, `accuracy` and `grad_norm` (before clipping) are of this update's batch, before the update. `tokens` are
    positions computed that are not padding, `learned` those with a loss, `seconds` the time since the last update,
    `memory` bytes in use (device memory where the device tells, else of the process). `machine` holds what each device
    of this process does (train.device_metrics) and, with several processes, `skew`: seconds from the fastest to the
    slowest.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]
    tokens: int
    learned: int
    seconds: float
    memory: int
    machine: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Validation loss after `step` updates, per unit of weight over the whole validation data."""

    step: int
    epoch: float
    loss: float
    metrics: dict[str, float]
    best: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Text generated after `step` updates."""

    step: int
    prompt: str
    text: str


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint of `step` updates is being written to `path`."""

    step: int
    path: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Note:
    """Something a person should read."""

    text: str


@dataclasses.dataclass(frozen=True)
class Stopped:
    """The loop ended after `step` updates; `reason` is empty when all were made."""

    step: int
    reason: str = ""


Event = Started | Stepped | Evaluated | Sampled | Saved | Note | Stopped


class Sink(Protocol):
    """Receives every event in order; `close` comes last, also after an error."""

    def receive(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Events:
    """Hands every event to all sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Gives the event to each sink in turn."""
        for sink in self.sinks:
            sink.receive(event)


@contextlib.contextmanager
def opened(sinks: Sequence[Sink]) -> Iterator[Events]:
    """Events for a block, with every sink closed at its end, whatever happens in between."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield Events(sinks)
