"""Curves as SVG text with axes, for pages that work without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

LARGE, SMALL = (960, 320), (460, 230)  # of a page's pixels, so that type has its size
TOP, RIGHT, BOTTOM, GAP = 26, 14, 42, 6
CHARACTER = 7.2  # pixels of a digit at most, at 12 pixels
DOTS = 60  # measurements that are fewer than this are also drawn as dots, if not every update has one
COLUMNS = 600  # of pixels that a curve is reduced to, each by its lowest and highest value


class Curve(NamedTuple):
    """Values at ascending updates; None where there is none. `style` is a class of the page's style sheet."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]
    style: str


class Tick(NamedTuple):
    """A place on an axis, and its text."""

    value: float
    text: str


def svg_plot(title: str, curves: Sequence[Curve], *, unit: str = "", size: tuple[int, int] = SMALL) -> str:
    """An SVG element with curves over updates, `unit` above their axis; "" where no value is a number."""
    points = [_finite(curve) for curve in curves]
    steps = [step for series in points for step, _ in series]
    values = [value for series in points for _, value in series]
    if not values:
        return ""
    width, height = size
    low, high, y_ticks = axis(min(values), max(values), max(3, (height - TOP - BOTTOM) // 44))
    left = GAP + CHARACTER * max(len(tick.text) for tick in y_ticks)
    first, last = min(steps), max(max(steps), min(steps) + 1)
    _, _, x_ticks = axis(first, last, max(2, int((width - left - RIGHT) // 60)), integer=True, end=True)

    def at(step: float, value: float) -> tuple[float, float]:
        x = left + (step - first) / (last - first) * (width - left - RIGHT)
        return x, TOP + (high - value) / (high - low) * (height - TOP - BOTTOM)

    parts = [f"<title>{html.escape(title)}</title>", f'<text x="0" y="12">{html.escape(unit)}</text>']
    for tick in y_ticks:
        y = at(first, tick.value)[1]
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - GAP:.1f}" y="{y:.1f}" dy="4" text-anchor="end">{tick.text}</text>')
    for tick in x_ticks:
        half = CHARACTER * len(tick.text) / 2
        x = min(at(tick.value, low)[0], width - half)
        parts.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{tick.text}</text>')
    middle = (left + width - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{height - 5}" text-anchor="middle">update</text>')
    for curve, series in zip(curves, points, strict=True):
        line = [at(step, value) for step, value in decimate(series)]
        style = html.escape(curve.style)
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline class="{style}" points="{places}"/>')
        dotted = line if len(series) < DOTS and len(series) < len(points[0]) else line[-1:]
        if style != "raw":
            parts += [f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in dotted]
    label = html.escape(title)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def axis(
    low: float, high: float, count: int, *, integer: bool = False, end: bool = False
) -> tuple[float, float, list[Tick]]:
    """The range of an axis and its ticks: round numbers in about `count` steps, whose texts all differ.

    It reaches out to a tick at both ends; with `end` it keeps its range, and `high` is a tick. `integer`: only whole
    numbers. board/page/ticks.js makes the same.
    """
    size = max(abs(low), abs(high))
    if integer:
        high = max(high, low + 1)
    elif high - low <= size * 1e-9:
        pad = size * 0.05 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = math.floor(math.log10(raw))
    mantissa = next((factor for factor in (1, 2, 5) if factor * 10.0**power >= raw * (1 - 1e-9)), 10)
    step = float(f"{mantissa}e{power}")
    step = max(1.0, step) if integer else step
    if end:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [float(f"{number * step:.15g}") for number in range(first, last + 1)]
    if not end:
        return values[0], values[-1], [Tick(value, _format(value, step, values)) for value in values]
    inner = [Tick(value, _format(value, step, values)) for value in values if high - value > 0.6 * step]
    last_tick = Tick(high, _format(high, 1.0 if integer else step / 10, [*values, high], trim=True))
    return low, high, [*inner, last_tick]


def _format(value: float, step: float, values: Sequence[float], *, trim: bool = False) -> str:
    """A value with as many digits as a step needs; `trim` leaves out zeros at the end."""
    largest, power = max(map(abs, values)), math.floor(math.log10(step) + 1e-9)
    if largest >= 1e7 or (power < -4 and largest < 0.01):
        if value == 0:
            return "0"
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - power)
        mantissa, exponent = f"{value:.{digits}e}".split("e")
        return f"{_trim_zeros(mantissa)}e{int(exponent)}"
    text = f"{value + 0.0:,.{max(0, -power)}f}"
    return _trim_zeros(text) if trim else text


def _trim_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def decimate(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
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
