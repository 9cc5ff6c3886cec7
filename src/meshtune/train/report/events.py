"""The events of a run as plain data: the loop emits them, and sinks display or record them.

Each sink has its own file in this package (progress, metrics_log, plot, trackers). Sinks never change the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Started:
    """The loop starts, after `done` of `total` updates."""

    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Stepped:
    """Update number `step` (from 1) is done.

    `loss`, `metrics` and `grad_norm` (before clipping) are computed on this update's batch with the parameters before
    the update. `tokens` counts positions that are not padding, `learned` those with a loss. `seconds` is the time since
    the previous update, `memory` the bytes in use (of the device if it reports them, else of the process). `machine`
    holds the figures of each local device (train.report.device_metrics) and, with several processes, `skew`: the
    seconds between the fastest and the slowest process. `slow` says that the update did more than others, and that its
    seconds are not those of an update.
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
    slow: bool = False


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Validation loss after `step` updates: the weighted mean over all validation data."""

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
    """A message for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class Stopped:
    """The loop ended after `step` updates; `reason` is empty if it ran them all."""

    step: int
    reason: str = ""


Event = Started | Stepped | Evaluated | Sampled | Saved | Note | Stopped


class Sink(Protocol):
    """Receives every event in order. `close` is called last, also after an error."""

    def receive(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Events:
    """Dispatches events to all sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Passes the event to each sink in turn."""
        for sink in self.sinks:
            sink.receive(event)


@contextlib.contextmanager
def open_sinks(sinks: Sequence[Sink]) -> Iterator[Events]:
    """Yields the dispatcher of `sinks`, and closes every sink at the end of the block, also after an error."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield Events(sinks)
