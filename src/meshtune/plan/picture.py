"""A plan as a picture: a memory bar for each target's devices, and each one's roofline."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshtune.plan.estimate import ROLES
from meshtune.plan.report import Report
from meshtune.plan.roofline import REACHED, Roofline

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

INK, GRID = "#1f2933", "#e4e7eb"


def draw(path: pathlib.Path, reports: Sequence[Report]) -> None:
    """Writes the PNG as one atomic replacement."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: importing it takes a second
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


def _memory(axes: Any, reports: Sequence[Report]) -> None:
    places = np.arange(len(reports))[::-1]
    start = np.zeros(len(reports))
    for role in ROLES:
        sizes = np.array([report.best.breakdown[role] / GIB for report in reports])
        if sizes.any():
            label = "activations and temporaries" if role == "activations" else role
            axes.barh(places, sizes, left=start, color=COLORS[role], height=0.5, label=label)
        start += sizes
    for place, report, used in zip(places, reports, start, strict=True):
        capacity, most = report.target.device.memory / GIB, report.best.limit / GIB
        axes.plot([capacity] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=1.6)
        axes.plot([most] * 2, [place - 0.36, place + 0.36], color=LIMIT, linewidth=1.6, linestyle=(0, (3, 2)))
        verdict = "fits" if report.best.fits else "does not fit"
        said = f"{used:.1f} GiB, {verdict}" + ("" if report.best.compiled else " (estimated)")
        axes.text(0, place + 0.32, said, color=INK, fontsize=9, va="bottom")
    axes.set_yticks(places, [f"{report.target}\n{report.best.option.mesh}" for report in reports])
    axes.set_ylim(-0.6, len(reports) - 0.3)
    axes.set_xlim(0, 1.05 * max([*start, *(report.target.device.memory / GIB for report in reports)]))
    axes.set_title("memory of a device (GiB)", loc="left", color=INK, fontsize=11, pad=12)
    axes.plot([], [], color=LIMIT, linewidth=1.6, linestyle=(0, (3, 2)), label="less the reserve")
    axes.plot([], [], color=INK, linewidth=1.6, label="capacity")
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4)
    _plain(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)


def _rooflines(axes: Any, reports: Sequence[Report]) -> None:
    """Rate against intensity: each device's roof, and under it where the update lies at most and where likely."""
    shades = [*COLORS.values()]
    found = [report.best.roofline for report in reports]
    places = [place for one in found for place in (one.intensity, one.peak * one.memory / one.memory_bytes)]
    low, high = min(places) / 8, max(places) * 8  # each update, and where each roof bends
    x = np.geomspace(low, high, 200)
    for report, times, shade in zip(reports, found, [shades[n % len(shades)] for n in range(len(found))], strict=True):
        bandwidth = times.memory_bytes / times.memory
        axes.plot(x, np.minimum(times.peak, bandwidth * x) / 1e12, color=shade, linewidth=2, label=str(report.target))
        reached = np.minimum(times.peak * REACHED["compute"], bandwidth * REACHED["memory"] * x)
        axes.plot(x, reached / 1e12, color=shade, linewidth=1, linestyle=(0, (4, 3)))
        axes.plot(times.intensity, _rate(times, times.bound), marker="^", color=shade, markersize=8)
        axes.plot(times.intensity, _rate(times, times.seconds), marker="o", color=shade, markersize=8)
        words = f"{100 * times.mfu:.0f}% MFU\nbound by {times.bound_by}"
        at = (times.intensity, _rate(times, times.seconds))
        axes.annotate(words, at, xytext=(8, -4), textcoords="offset points", fontsize=8, color=INK, va="top")
    axes.plot([], [], marker="^", linestyle="", color=BOUND, label="at most (messages included)")
    axes.plot([], [], marker="o", linestyle="", color=BOUND, label="likely")
    axes.plot([], [], color=BOUND, linewidth=1, linestyle=(0, (4, 3)), label="what is reached of the data sheet")
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = [_rate(one, seconds) for one in found for seconds in (one.seconds, one.bound)]
    axes.set_ylim(min(rates) / 4, 2 * max(one.peak for one in found) / 1e12)  # room for the words under a mark
    axes.set_xlabel("operations a byte of device memory", color=INK)
    axes.set_title("roofline (TFLOP/s of a device)", loc="left", color=INK, fontsize=11, pad=12)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    _plain(axes)
    axes.grid(color=GRID, linewidth=0.8)


def _rate(times: Roofline, seconds: float) -> float:
    return times.flops / seconds / 1e12


def _plain(axes: Any) -> None:
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
