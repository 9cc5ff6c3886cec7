"""A run as notebooks show it: its plots, samples, report and numbers, read from the files in its folder."""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError
from meshtune.train.report.metrics_log import METRICS, SAMPLES, read
from meshtune.train.report.page import EXACT, column, loss_unit, metric_title, report_html, samples_html
from meshtune.train.report.plot import PLOT, SmoothedLoss, figure_of

if TYPE_CHECKING:
    from meshtune.train.report.events import Started
    from meshtune.train.report.figure import NotebookFigure
    from meshtune.train.result.final import Result

PAGE_PIXELS = 640  # the height of a report under a cell
BAR_SECONDS = 0.25  # between two pictures of a bar


class Samples(list[dict[str, Any]]):
    """The texts that a run generated, in the order of updates, each with `step`, `prompt` and `text`."""

    def _repr_html_(self) -> str:
        return "".join(samples_html(self)) or "<p>no samples: the recipe has no sample.prompts</p>"


@dataclasses.dataclass(frozen=True)
class Report:
    """The page of a run, as in the file at `path`."""

    path: pathlib.Path

    def _repr_html_(self) -> str:
        page = html.escape(report_html(self.path.parent), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {PAGE_PIXELS}px; border: 0"></iframe>'


def read_samples(output: pathlib.Path) -> Samples:
    """Reads the samples of the run in `output`."""
    return Samples(read(output / SAMPLES))


def plot_metric(output: pathlib.Path, metric: str, total: int) -> NotebookFigure:
    """The curve of a metric over the updates of the run in `output`, which were to be `total`.

    Raises: UserError for a metric without a number in the run.
    """
    rows = read(output / METRICS)
    train, validation = (_points([row for row in rows if row["kind"] == kind], metric) for kind in ("train", "eval"))
    if not train:
        numbers = (key for row in rows for key in row if key != "step" and column([row], key) != [None])
        raise UserError(
            f"the run has no metric {metric!r}",
            where=str(output / METRICS),
            fix=f"one of {', '.join(dict.fromkeys(numbers)) or 'none: it made no update'}",
        )
    values = [value for _, value in train]
    curve = values if metric in EXACT else SmoothedLoss(total, values).history
    label = f"loss, {loss_unit(rows[0])}" if metric == "loss" else metric
    title = f"{output.absolute().name}: {metric_title(metric)}"
    return figure_of(train, curve, validation, title=title, label=label)


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    values = zip(rows, column(rows, metric), strict=True)
    return [(row["step"], value) for row, value in values if value is not None]


def summary_html(result: Result) -> str:
    """A table of a run's outcome, and the picture of its loss where it was drawn."""
    losses = {"smoothed loss": result.smoothed_loss, "validation loss": result.eval_loss}
    facts = {
        "updates": f"{result.steps} of {result.total}",
        **{name: f"{loss:.4f}" for name, loss in losses.items() if loss is not None},
        "time": f"{result.seconds:,.0f} s",
        "result": str(result.path or "none yet: interrupted"),
    }
    rows = "".join(
        f"<tr><th style='text-align: left'>{name}</th><td style='text-align: left'>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    picture = result.output / PLOT
    if not picture.is_file():
        return f"<table>{rows}</table>"
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<table>{rows}</table><img alt="the loss" width="720" src="data:image/png;base64,{data}">'


class NotebookBar:
    """The bar of a notebook, in HTML under the cell."""

    def __init__(self, start: Started):
        self._display = importlib.import_module("IPython.display")
        self._start, self._done, self._fields = start, start.done, {"loss": "-"}
        self._began = self._drawn = time.monotonic()
        self._handle = self._display.display(self._display.HTML(self._html()), display_id=True)

    def update(self, completed: int | None, fields: Mapping[str, str]) -> None:
        self._fields = self._fields | dict(fields)
        self._done = self._done if completed is None else completed
        if time.monotonic() - self._drawn >= BAR_SECONDS:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._handle.update(self._display.HTML(self._html()))
        self._drawn = time.monotonic()

    def _html(self) -> str:
        done, total = self._done, self._start.total
        elapsed = time.monotonic() - self._began
        times = [_clock(elapsed)]
        if (updates := done - self._start.done) and done < total:
            times.append(f"eta {_clock(elapsed / updates * (total - done))}")
        texts = [f"{done}/{total}", f"smoothed loss {self._fields['loss']}"]
        texts += [text for name, text in self._fields.items() if name != "loss" and text] + times
        bar = f'<progress value="{done}" max="{total}" style="width: 30%"></progress>'
        return f"<div>training {bar} {html.escape(', '.join(texts))}</div>"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"
