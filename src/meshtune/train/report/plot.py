"""loss.png: training and validation loss against updates, redrawn while the run goes on."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshtune.plan.picture import GRID, INK
from meshtune.train.report.events import Evaluated, Event, Stepped

PLOT = "loss.png"
TRAIN, VALIDATION = "#2f6fde", "#d9480f"
SHARE = 0.03  # of the time that drawing may take
POINTS = 2000  # more cannot be told apart in the picture


class LossPlot:
    """The sink that draws. `history` holds rows of metrics.jsonl from before a resume."""

    def __init__(self, output: pathlib.Path, *, every: int, title: str, history: Sequence[dict[str, Any]] = ()):
        self._path, self._every, self._title = output / PLOT, every, title
        self._train = [(row["step"], row["loss"]) for row in history if row["kind"] == "train"]
        self._validation = [(row["step"], row["loss"]) for row in history if row["kind"] == "eval"]
        self._not_before = 0.0

    def receive(self, event: Event) -> None:
        match event:
            case Stepped():
                self._train.append((event.step, event.loss))
                if event.step % self._every == 0 and time.monotonic() >= self._not_before:
                    self._draw()
            case Evaluated():
                self._validation.append((event.step, event.loss))

    def close(self) -> None:
        if self._train:
            self._draw()

    def _draw(self) -> None:
        began = time.monotonic()
        draw(self._path, self._train, self._validation, title=self._title)
        took = time.monotonic() - began
        self._not_before = time.monotonic() + took / SHARE


def smoothed(values: np.ndarray) -> np.ndarray:
    """An exponential mean over about a twentieth of the run, corrected for its start; the same length."""
    keep = 1.0 - 1.0 / max(1.0, min(50.0, len(values) / 20))
    out, mean, weight = np.empty(len(values)), 0.0, 0.0
    for at, value in enumerate(values):
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out[at] = mean / weight
    return out


def draw(
    path: pathlib.Path,
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    *,
    title: str = "",
) -> None:
    """Writes the picture as one atomic replacement. `train` and `validation` are (update, loss) pairs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: importing it takes a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=140, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    steps, losses = _columns(train)
    thin = max(1, len(steps) // POINTS)
    axes.plot(steps[::thin], losses[::thin], color=TRAIN, alpha=0.25, linewidth=1)
    curve = smoothed(losses)
    axes.plot(steps[::thin], curve[::thin], color=TRAIN, linewidth=2, label=f"training, {curve[-1]:.3f} (smoothed)")
    shown = [losses[len(losses) // 50 :]]
    if validation:
        at, values = _columns(validation)
        best = int(np.argmin(values))
        axes.plot(at, values, color=VALIDATION, linewidth=2, marker="o", markersize=4, label="validation")
        axes.annotate(
            f"{values[best]:.3f}",
            (at[best], values[best]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="center",
            color=VALIDATION,
            fontsize=9,
        )
        shown.append(values)
    _limits(axes, np.concatenate(shown))
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=12)
    axes.set_xlabel("update", color=INK)
    axes.set_ylabel("loss per token (nats)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    draft = path.with_name(f".{path.name}.partial")
    FigureCanvasAgg(figure).print_png(draft)
    os.replace(draft, path)


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([step for step, _ in pairs]), np.array([loss for _, loss in pairs], float)


def _limits(axes: Any, values: np.ndarray) -> None:
    """The range without the first fiftieth's spikes, with some air."""
    low, high = float(values.min()), float(values.max())
    air = 0.08 * (high - low) or 0.1 * abs(high) or 0.1
    axes.set_ylim(low - air, high + air)
