"""The curve of the loss as a picture, and its exponential mean."""

from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.terminal import GRID, INK
from meshtune.train.report.events import Evaluated, Event, Stepped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from meshtune.train.report.figure import NotebookFigure

MAX_SPAN = 50.0  # updates
SHARE_OF_RUN = 1 / 20


class SmoothedLoss:
    """A sink that keeps the exponential moving average of the loss, over about a twentieth of the run.

    The span grows with the number of updates made, from 1 to its final length, so that the mean starts at the first
    loss and follows the fast decrease at the beginning of a run without lag. Losses that are not finite, as of an
    update that overflows in float16 and is skipped, are left out. `history` holds the losses of the updates before a
    resume.
    """

    def __init__(self, total: int, history: Iterable[float] = ()):
        self.final_span = max(1.0, min(MAX_SPAN, total * SHARE_OF_RUN))
        self._count = 0
        self.value: float | None = None
        self.history = [self.update(loss) for loss in history]

    @property
    def span(self) -> float:
        """Approximate number of updates that the mean covers; 1 means that it equals the last loss."""
        return min(self.final_span, 1.0 + self._count / 4)

    def update(self, loss: float) -> float:
        """Adds the loss of one update and returns the new mean."""
        if not math.isfinite(loss):
            return loss if self.value is None else self.value
        weight = 1.0 / self.span
        self.value = loss if self.value is None else self.value + weight * (loss - self.value)
        self._count += 1
        return self.value

    def receive(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.update(event.loss)

    def close(self) -> None:
        """Nothing to close."""


PLOT = "loss.png"
TRAIN, VALIDATION = "#2f6fde", "#d9480f"
SHARE = 0.03  # of the run time that drawing may take
POINTS = 2000  # more are indistinguishable at this image size


class LossPlot:
    """The sink that draws the plot.

    `history` holds the rows of metrics.jsonl from before a resume. `loss` is the smoothed loss; it must precede this
    sink in the list of sinks, so that it has received each event first.
    """

    def __init__(
        self,
        output: pathlib.Path,
        loss: SmoothedLoss,
        *,
        interval: int,
        title: str,
        unit: str = "token",
        history: Sequence[Mapping[str, Any]] = (),
    ):
        self._path, self._interval, self._title, self._unit = output / PLOT, interval, title, unit
        self._loss, self._curve = loss, list(loss.history)
        self._train = [(row["step"], row["loss"]) for row in history if row["kind"] == "train"]
        self._validation = [(row["step"], row["loss"]) for row in history if row["kind"] == "eval"]
        self._not_before = 0.0

    def receive(self, event: Event) -> None:
        match event:
            case Stepped():
                self._train.append((event.step, event.loss))
                self._curve.append(event.loss if self._loss.value is None else self._loss.value)
                if event.step % self._interval == 0 and time.monotonic() >= self._not_before:
                    self._draw()
            case Evaluated():
                self._validation.append((event.step, event.loss))

    def close(self) -> None:
        if self._train:
            self._draw()

    def _draw(self) -> None:
        start = time.monotonic()
        draw(self._path, self._train, self._curve, self._validation, title=self._title, unit=self._unit)
        took = time.monotonic() - start
        self._not_before = time.monotonic() + took / SHARE


def draw(
    path: pathlib.Path,
    train: Sequence[tuple[int, float]],
    curve: Sequence[float],
    validation: Sequence[tuple[int, float]],
    *,
    title: str = "",
    unit: str = "token",
) -> None:
    """Draws the plot and replaces the file atomically.

    `train` and `validation` are (update, loss) pairs, `curve` the smoothed training loss at the updates of `train`.
    `unit` names what the loss is averaged over.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here since it takes a second

    drawn = figure_of(train, curve, validation, title=title, label=loss_label(unit))
    draft = path.with_name(f".{path.name}.partial")
    FigureCanvasAgg(drawn).print_png(draft)
    os.replace(draft, path)


def figure_of(
    train: Sequence[tuple[int, float]],
    curve: Sequence[float],
    validation: Sequence[tuple[int, float]],
    *,
    title: str,
    label: str,
) -> NotebookFigure:
    """The figure that `draw` writes, with the arguments of `draw`; `label` is that of the vertical axis."""
    from matplotlib.ticker import MaxNLocator

    from meshtune.train.report.figure import NotebookFigure

    figure = NotebookFigure(figsize=(8, 4.5), dpi=140, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    steps, losses = _columns(train)
    thin = max(1, len(steps) // POINTS)
    axes.plot(steps[::thin], losses[::thin], color=TRAIN, alpha=0.25, linewidth=1)
    last = f"training, smoothed: {curve[-1]:.4f}"
    axes.plot(steps[::thin], curve[::thin], color=TRAIN, linewidth=2, label=last)
    visible = [losses]
    if validation:
        at, values = _columns(validation)
        best = int(np.argmin(np.where(np.isnan(values), np.inf, values)))
        axes.plot(
            at, values, color=VALIDATION, linewidth=2, marker="o", markersize=4, label=f"validation: {values[-1]:.4f}"
        )
        axes.annotate(
            f"{values[best]:.4f}",
            (at[best], values[best]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            color=VALIDATION,
            fontsize=9,
        )
        visible.append(values)
    _limits(axes, np.concatenate(visible))
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=26)
    axes.set_xlabel("update", color=INK)
    axes.set_ylabel(label, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
    # Between the title and the axes: any place inside may overlap the curves.
    axes.legend(frameon=False, labelcolor=INK, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)
    return figure


def loss_label(unit: str) -> str:
    """The label of a loss that is averaged over `unit`."""
    return f"loss per {unit} (nats)" if unit == "token" else f"loss per {unit}"


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([step for step, _ in pairs]), np.array([loss for _, loss in pairs], float)


def _limits(axes: Axes, values: np.ndarray) -> None:
    """Sets the y limits to the range of the finite `values` with a margin."""
    values = values[np.isfinite(values)]
    if not values.size:
        return
    low, high = float(values.min()), float(values.max())
    air = 0.05 * (high - low) or 0.1 * abs(high) or 0.1
    axes.set_ylim(low - air, high + air)
