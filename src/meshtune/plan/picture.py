"""Draws plans as a PNG: the memory of a device by role for each target, and each target's roofline."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.costs.estimate import ROLES
from meshtune.costs.roofline import EFFICIENCY, Roofline
from meshtune.plan.report import PlanReport
from meshtune.terminal import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "weights": "#2f6fde",
    "adapters": "#12b5cb",
    "gradients": "#9b51e0",
    "optimizer": "#f2a93b",
    "activations": "#27ae60",
    "output": "#8896a5",
}
LIMIT, BOUND = "#d9480f", "#8896a5"
GIB = 2**30


def draw(path: pathlib.Path, reports: Sequence[PlanReport]) -> None:
    """Writes the PNG atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes a second
    from matplotlib.figure import Figure

    height = max(4.2, 1.6 + 0.75 * len(reports))
    figure = Figure(figsize=(13, height), dpi=140, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(6, 5))
    _memory(left, reports)
    _rooflines(right, reports)
    draft = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(draft)
    os.replace(draft, path)


def _memory(axes: Axes, reports: Sequence[PlanReport]) -> None:
    positions = np.arange(len(reports))[::-1]
    start = np.zeros(len(reports))
    for role in ROLES:
        sizes = np.array([report.best.breakdown[role] / GIB for report in reports])
        if sizes.any():
            label = "activations and temporaries" if role == "activations" else role
            axes.barh(positions, sizes, left=start, color=COLORS[role], height=0.5, label=label)
        start += sizes
    for position, report, used in zip(positions, reports, start, strict=True):
        capacity, limit = report.target.device.memory / GIB, report.best.memory_limit / GIB
        extent = [position - 0.36, position + 0.36]
        axes.plot([capacity] * 2, extent, color=INK, linewidth=1.6)
        axes.plot([limit] * 2, extent, color=LIMIT, linewidth=1.6, linestyle=(0, (3, 2)))
        verdict = "fits" if report.best.fits else "does not fit"
        label = f"{used:.1f} GiB, {verdict}" + ("" if report.best.compiled else " (estimated)")
        axes.text(0, position + 0.32, label, color=INK, fontsize=9, va="bottom")
    axes.set_yticks(positions, [f"{report.target}\n{report.best.predicted.mesh}" for report in reports])
    axes.set_ylim(-0.6, len(reports) - 0.3)
    axes.set_xlim(0, 1.05 * max([*start, *(report.target.device.memory / GIB for report in reports)]))
    axes.set_title("memory per device (GiB)", loc="left", color=INK, fontsize=11, pad=12)
    axes.plot([], [], color=LIMIT, linewidth=1.6, linestyle=(0, (3, 2)), label="limit (less the reserve)")
    axes.plot([], [], color=INK, linewidth=1.6, label="capacity")
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4)
    _hide_frame(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)


def _rooflines(axes: Axes, reports: Sequence[PlanReport]) -> None:
    """Rate over arithmetic intensity: each device's roofline, with the update at its bound and at its expected time."""
    palette = list(COLORS.values())
    rooflines = [report.best.roofline for report in reports]
    intensities = [times.intensity for times in rooflines]
    ridges = [times.peak * times.memory / times.memory_bytes for times in rooflines]
    x = np.geomspace(min([*intensities, *ridges]) / 8, max([*intensities, *ridges]) * 8, 200)
    for index, (report, times) in enumerate(zip(reports, rooflines, strict=True)):
        color = palette[index % len(palette)]
        bandwidth = times.memory_bytes / times.memory
        axes.plot(x, np.minimum(times.peak, bandwidth * x) / 1e12, color=color, linewidth=2, label=str(report.target))
        achievable = np.minimum(times.peak * EFFICIENCY["compute"], bandwidth * EFFICIENCY["memory"] * x)
        axes.plot(x, achievable / 1e12, color=color, linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(times.intensity, _rate(times, times.bound), marker="^", color=color, markersize=8)
        axes.plot(times.intensity, _rate(times, times.seconds), marker="o", color=color, markersize=8)
        label = f"{100 * times.mfu:.0f}% MFU\nbound by {times.bound_by}"
        point = (times.intensity, _rate(times, times.seconds))
        axes.annotate(label, point, xytext=(8, -4), textcoords="offset points", fontsize=8, color=INK, va="top")
    axes.plot([], [], marker="^", linestyle="", color=BOUND, label="at most (messages included)")
    axes.plot([], [], marker="o", linestyle="", color=BOUND, label="expected")
    axes.plot([], [], color=BOUND, linewidth=1, linestyle=(0, (4, 3)), label="achievable")
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = [_rate(times, seconds) for times in rooflines for seconds in (times.seconds, times.bound)]
    axes.set_ylim(min(rates) / 4, 2 * max(times.peak for times in rooflines) / 1e12)  # room for the labels below marks
    axes.set_xlabel("operations per byte of device memory", color=INK)
    axes.set_title("roofline (TFLOP/s per device)", loc="left", color=INK, fontsize=11, pad=12)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    _hide_frame(axes)
    axes.grid(color=GRID, linewidth=0.8)


def _rate(times: Roofline, seconds: float) -> float:
    return times.flops / seconds / 1e12


def _hide_frame(axes: Axes) -> None:
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
