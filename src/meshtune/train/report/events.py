"""The events of a run, their sinks, and the trackers that they can be sent to.

Each sink has its own file in this package (progress, metrics_log, plot, trackers). Sinks never change the run.

TensorBoard files are written by tensorboard's own writer, without tensorflow or torch. The others are imported only
when the recipe selects them; a missing package is an error before the run does any work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from meshtune.errors import UserError, pip_install


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
    seconds are not those of an update. `rollout_seconds`, which are no part of `seconds`, were spent on the batch.
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
    rollout_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Generating:
    """Of a rollout, `done` of `total` completions have ended."""

    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class RolledOut:
    """Completions were generated for the updates from number `step` on; a mapping for each, with its rewards."""

    step: int
    rows: Sequence[Mapping[str, object]]


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
    """Text generated after `step` updates. `pictures` are those of the prompt, small and as data URIs."""

    step: int
    prompt: str
    text: str
    pictures: tuple[str, ...] = ()


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


Event = Started | Stepped | Generating | RolledOut | Evaluated | Sampled | Saved | Note | Stopped


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


# (module, how to install it) by tracker.
NEEDS = {
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", pip_install("wandb")),
    "trackio": ("trackio", pip_install("trackio")),
    "mlflow": ("mlflow", pip_install("mlflow")),
}


def check_installed(names: list[str]) -> None:
    """Raises UserError for the first tracker that is not installed."""
    for name in names:
        module, fix = NEEDS[name]
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the tracker '{name}' is not installed", where="log.trackers", fix=fix)


def scalars(event: Event) -> tuple[int, dict[str, float]] | None:
    """Returns (step, {tag: value}) of training and evaluation events, else None. Tags: train/loss, eval/loss, ..."""
    match event:
        case Stepped():
            rate = event.tokens / event.seconds if event.seconds else 0.0
            named = {"loss": event.loss, "grad_norm": event.grad_norm, "learning_rate": event.learning_rate}
            named |= {**event.metrics, "epoch": event.epoch, "tokens_per_second": rate}
            return event.step, {f"train/{name}": value for name, value in named.items()}
        case Evaluated():
            named = {"loss": event.loss, **event.metrics}
            return event.step, {f"eval/{name}": value for name, value in named.items()}
    return None


class TensorBoard:
    """Event files in output/tensorboard. Resuming at `start` discards later points in the board."""

    def __init__(self, output: pathlib.Path, project: str, recipe: Mapping[str, object], start: int):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Generated modules: type checkers cannot see their classes.
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._record, self._summary = events.Event, summaries.Summary
        self._writer = EventFileWriter(str(output / "tensorboard"), flush_secs=10)
        if start:
            log = events.SessionLog(status=events.SessionLog.START)
            self._writer.add_event(events.Event(wall_time=time.time(), step=start + 1, session_log=log))

    def receive(self, event: Event) -> None:
        if (point := scalars(event)) is not None:
            step, named = point
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in named.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._record(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; a resumed run continues under the same id."""

    def __init__(self, output: pathlib.Path, project: str, recipe: Mapping[str, object], start: int):
        wandb: Any = importlib.import_module("wandb")
        name = output.resolve().name
        self._run = wandb.init(
            project=project, name=name, id=_run_id(output, start), resume="allow", dir=str(output), config=recipe
        )

    def receive(self, event: Event) -> None:
        if (point := scalars(event)) is not None:
            self._run.log(point[1], step=point[0])
        elif isinstance(event, Sampled):
            self._run.log({"sample": f"{event.prompt}\n\n{event.text}"}, step=event.step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio (https://github.com/gradio-app/trackio), stored locally."""

    def __init__(self, output: pathlib.Path, project: str, recipe: Mapping[str, object], start: int):
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(project=project, name=_run_id(output, start), config=recipe, resume="allow")
        self._finish = trackio.finish

    def receive(self, event: Event) -> None:
        if (point := scalars(event)) is not None:
            self._run.log(point[1], step=point[0])

    def close(self) -> None:
        self._finish()


class Mlflow:
    """A run of MLflow at $MLFLOW_TRACKING_URI, or in a SQLite database in the output."""

    def __init__(self, output: pathlib.Path, project: str, recipe: Mapping[str, object], start: int):
        import os

        mlflow: Any = importlib.import_module("mlflow")
        self._mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{output.resolve() / 'mlflow.db'}")
        mlflow.set_experiment(project)
        id_file = output / ".mlflow"
        run_id = id_file.read_text().strip() if start and id_file.exists() else None
        run = mlflow.start_run(run_id=run_id, run_name=output.resolve().name)
        if run_id is None:
            id_file.write_text(run.info.run_id)
            mlflow.log_dict(recipe, "recipe.json")

    def receive(self, event: Event) -> None:
        if (point := scalars(event)) is not None:
            self._mlflow.log_metrics(point[1], step=point[0])

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[pathlib.Path, str, dict[str, object], int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def _run_id(output: pathlib.Path, start: int) -> str:
    """Returns the run's id; a resumed run reads the id that the first one stored."""
    id_file = output / ".run-id"
    if start and id_file.exists():
        return id_file.read_text().strip()
    import secrets

    name = f"{output.resolve().name}-{secrets.token_hex(4)}"
    id_file.write_text(name)
    return name
