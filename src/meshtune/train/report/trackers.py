"""Sinks for TensorBoard, Weights & Biases, trackio and MLflow.

TensorBoard files are written by tensorboard's own writer, without tensorflow or torch. The others are imported only
when the recipe selects them; a missing package is an error before the run does any work.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshtune.errors import UserError, pip_install
from meshtune.train.report.events import Evaluated, Event, Sampled, Sink, Stepped

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
