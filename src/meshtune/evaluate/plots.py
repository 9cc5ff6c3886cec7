"""Pictures of a comparison: the difference of every metric with its interval, and the loss of each record."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.evaluate.predict import Predictions
from meshtune.evaluate.statistics import TOO_FEW, Difference
from meshtune.terminal import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"gained": "#1b7f4b", "lost": "#d9480f", "unclear": "#8896a5", "same": "#8896a5", TOO_FEW: "#c3cbd3"}
FILLS = COLORS | {TOO_FEW: "white"}
POINT = "#2f6fde"


def draw_differences(
    path: pathlib.Path, professional: Sequence[Difference], general: Mapping[str, Sequence[Difference]]
) -> None:
    """Draws each difference in per cent of the larger of its two values, better to the right.

    Values beyond 100 per cent are cut off. A difference of too few samples has no interval.
    """
    from matplotlib.lines import Line2D

    named = [("your records", item) for item in professional]
    named += [(name, item) for name, listed in general.items() for item in listed]
    figure, axes = _axes(height=1.4 + 0.32 * len(named))
    for place, (_, item) in enumerate(named):
        sign = (1 if item.higher_is_better else -1) * 100 / (max(abs(item.before), abs(item.after)) or 1.0)
        color = COLORS[item.verdict]
        if item.verdict != TOO_FEW:
            ends = sorted((sign * item.low, sign * item.high))
            axes.plot(np.clip(ends, -100, 100), [place, place], color=color, linewidth=2, solid_capstyle="butt")
        middle = float(np.clip(sign * item.change, -100, 100))
        axes.plot([middle], [place], "o", color=color, markersize=6, markerfacecolor=FILLS[item.verdict])
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(named)), [f"{name}: {item.metric}" for name, item in named])
    axes.set_ylim(len(named) - 0.5, -0.5)
    interval = "" if all(item.verdict == TOO_FEW for _, item in named) else ", with the 98% interval"
    axes.set_xlabel(f"worse or better than before, % of the larger value{interval}", color=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    present = [verdict for verdict in COLORS if any(item.verdict == verdict for _, item in named)]
    handles = [
        Line2D([], [], color=COLORS[verdict], marker="o", linestyle="", markerfacecolor=FILLS[verdict], label=verdict)
        for verdict in present
    ]
    axes.legend(
        handles=handles, frameon=False, labelcolor=INK, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(present)
    )
    _write(figure, path)


def draw_losses(path: pathlib.Path, before: Predictions, after: Predictions) -> bool:
    """Draws the loss of each record before and after; whether there was any."""
    pairs = [
        (old["loss"], new["loss"])
        for old, new in zip(before.rows, after.rows, strict=True)
        if old.get("loss") is not None and new.get("loss") is not None
    ]
    if not pairs:
        return False
    old, new = np.asarray(pairs).T
    figure, axes = _axes(height=4.6, width=5.4)
    top = float(max(old.max(), new.max())) * 1.05
    axes.plot([0, top], [0, top], color=INK, linewidth=1)
    axes.plot(old, new, "o", color=POINT, alpha=0.6, markersize=5, markeredgewidth=0)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("loss per token before (nats)", color=INK)
    axes.set_ylabel("after", color=INK)
    better = int((new < old).sum())
    axes.set_title(f"{better} of {len(old)} records have a lower loss", loc="left", color=INK, fontsize=11)
    axes.grid(color=GRID, linewidth=0.8)
    _write(figure, path)
    return True


def _axes(*, height: float, width: float = 9.0) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # imported here since it takes a second

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
    return figure, axes


def _write(figure: Figure, path: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    draft = path.with_name(f".{path.name}.partial")
    FigureCanvasAgg(figure).print_png(draft)
    os.replace(draft, path)
