"""Curves as SVG text, for pages that work without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 720, 260
LEFT, TOP, RIGHT, BOTTOM = 62, 12, 12, 26
DOTS = 60  # measurements that are fewer than this are also drawn as dots, if not every update has one
COLUMNS = 600  # of pixels that a curve is reduced to, each by its lowest and highest value


class Curve(NamedTuple):
    """Values at ascending updates; None where there is none. `style` is a class of the page's style sheet."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]
    style: str


def svg_plot(title: str, curves: Sequence[Curve]) -> str:
    """An SVG element with axes and curves; "" where no value is a number."""
    points = [_finite(curve) for curve in curves]
    steps = [step for series in points for step, _ in series]
    values = [value for series in points for _, value in series]
    if not values:
        return ""
    low, high = min(values), max(values)
    pad = 0.06 * ((high - low) or abs(high) or 1.0)
    x_range, y_range = (min(steps), max(max(steps), min(steps) + 1)), (low - pad, high + pad)

    def at(step: float, value: float) -> str:
        x = LEFT + (step - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)
        y = TOP + (y_range[1] - value) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [f"<title>{html.escape(title)}</title>"]
    for tick in _ticks(*y_range, 4):
        y = at(x_range[0], tick).partition(",")[2]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick:.4g}</text>')
    for tick in _ticks(*x_range, 6):
        x = at(tick, low).partition(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 7}" text-anchor="middle">{tick:.6g}</text>')
    for curve, series in zip(curves, points, strict=True):
        line = " ".join(at(step, value) for step, value in reduced(series))
        style = html.escape(curve.style)
        parts.append(f'<polyline class="{style}" points="{line}"/>')
        if len(series) < DOTS and len(series) < len(points[0]):
            centres = [at(step, value).split(",") for step, value in series]
            parts += [f'<circle class="{style}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in centres]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'


def reduced(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The first, lowest, highest and last point of each of COLUMNS columns, so that no spike is lost."""
    if len(points) <= 4 * COLUMNS:
        return list(points)
    start, end = points[0][0], points[-1][0]
    columns: dict[int, list[int]] = {}
    for index, (step, _) in enumerate(points):
        columns.setdefault(int((step - start) / (end - start) * COLUMNS), []).append(index)
    result = []
    for indices in columns.values():
        lowest = min(indices, key=lambda index: points[index][1])
        highest = max(indices, key=lambda index: points[index][1])
        result += [points[index] for index in sorted({indices[0], lowest, highest, indices[-1]})]
    return result


def _finite(curve: Curve) -> list[tuple[float, float]]:
    pairs = zip(curve.steps, curve.values, strict=True)
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def _ticks(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step)
    return [tick * step for tick in range(first, math.floor(high / step) + 1)]
