"""Writes report.html, one file without scripts: the run in numbers, its curves and samples."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from meshtune.config import yaml_text
from meshtune.config.load import load_recipe, silent
from meshtune.digests import DamagedError
from meshtune.errors import UserError
from meshtune.runs.output import RECIPE, ROLLOUTS, read_run
from meshtune.train.report.attempts import Goodput
from meshtune.train.report.metrics_log import METRICS, SAMPLES, TIMINGS, read
from meshtune.train.report.plot import SmoothedLoss

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


REPORT = "report.html"
# The words of the board's page, in English.
METRIC_NAMES = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "memory": "Memory",
    "rewards/margins": "Reward margin",
    "rewards/chosen": "Reward of chosen answers",
    "rewards/rejected": "Reward of rejected answers",
    "rewards/accuracies": "Pairs with the better answer ahead",
    "logps/chosen": "Log-probability of chosen answers",
    "logps/rejected": "Log-probability of rejected answers",
    "log_odds": "Log-odds of chosen answers",
    "nll": "Cross-entropy of chosen answers",
    "kl": "KL from the reference",
    "objective/kl": "KL from the reference, a completion",
    "kl_coef": "Weight of the KL divergence",
    "aux_loss": "Loss of the router",
    "reward": "Reward",
    "reward_std": "Spread of rewards within a prompt",
    "frac_reward_zero_std": "Share of prompts with equal rewards",
    "completions/mean_length": "Tokens a completion",
    "completions/min_length": "Tokens of the shortest completion",
    "completions/max_length": "Tokens of the longest completion",
    "completions/mean_terminated_length": "Tokens a completion that ended by itself",
    "completions/clipped_ratio": "Share of completions cut at the limit",
    "entropy": "Entropy of the next token",
    "ratio/mean": "Mean ratio to the probability before",
    "ratio/distance": "Mean distance of the ratio from 1",
    "clip_ratio/low_mean": "Share of tokens clipped below",
    "clip_ratio/high_mean": "Share of tokens clipped above",
    "clip_ratio/region_mean": "Share of tokens clipped",
    "cispo_clip_ratio": "Share of tokens with a capped ratio",
    "vespo/phi_seq_mean": "Mean weight of a completion",
    "sampling/sampling_logp_difference/mean": "Mean difference of log-probability, sampler and trainer",
    "sampling/sampling_logp_difference/max": "Largest difference of log-probability, sampler and trainer",
}
EXACT = {"learning_rate", "memory"}  # are drawn as they are
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
NO_CURVES = {"kind", "step", "epoch", "loss", "tokens", "learned_tokens", "best", *TIMINGS} - {
    "tokens_per_second",
    "memory",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #52606d; --ground: #fff; --line: #e4e7eb; --code: #f2f4f7;
  --train: #1d4ed8; --validation: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --quiet: #a3b0be; --ground: #12171d; --line: #2b3540;
  --code: #1b222b; --train: #8ab4ff; --validation: #ff9f6b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere; } h3 { font-size: 1rem; margin-bottom: .2rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.plots > :first-child { grid-column: 1 / -1; }
.plots > div { overflow-x: auto; } .plots > :first-child svg { min-width: 36rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--quiet); } .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke: var(--train); }
.raw { opacity: .35; stroke-width: 1; } polyline.validation { stroke: var(--validation); }
circle.training { fill: var(--train); } circle.validation { fill: var(--validation); }
.key { color: var(--quiet); font-size: .9rem; margin: 0 0 .3rem; } .key b { color: var(--train); }
.key i { color: var(--validation); font-style: normal; font-weight: 600; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1rem .2rem 0;
  border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre { background: var(--code); padding: .8rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); } .wide { overflow-x: auto; } .wide pre { margin: 0; }
"""


def write_report(output: pathlib.Path) -> None:
    """Writes report.html of the run in `output`, replacing the file atomically."""
    draft = output / f".{REPORT}.partial"
    draft.write_text(report_html(output), encoding="utf-8")
    os.replace(draft, output / REPORT)


def report_html(output: pathlib.Path) -> str:
    """Renders the page of a run from its files; they may be those of a run under way, and some may be missing."""
    try:
        run = read_run(output)
    except DamagedError:
        run = {}
    rows, samples = read(output / METRICS), read(output / SAMPLES)
    try:
        recipe = (output / RECIPE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        recipe = ""
    title = html.escape(output.absolute().name)
    parts = [f"<h1>{title}</h1>", _table(_facts(run, rows)), *_prediction_table(run.get("prediction"))]
    parts += ["<h2>Curves</h2>", *_curves(rows, run.get("total"))] if rows else []
    parts += ["<h2>Samples</h2>", *samples_html(samples)] if samples else []
    parts += _completions(output) if (output / ROLLOUTS).is_file() else []
    parts += _recipe(recipe)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
    updates = [row for row in rows if row.get("kind") == "train"]
    seconds = sum(row.get("seconds") or 0.0 for row in rows)
    trained, base = run.get("trained_on") or {}, run.get("base") or {}
    versions = run.get("versions") or {}
    facts: list[tuple[str, object]] = [
        ("status", run.get("status", "unknown")),
        ("base model", base.get("path")),
        ("updates", f"{updates[-1]['step']} of {run.get('total', '?')}" if updates else None),
        ("smoothed loss", _number(run.get("smoothed_loss"))),
        ("best validation loss", _best(run.get("best"))),
        ("trained on", f"{trained['samples']:,} {trained.get('noun', '')}" if trained.get("samples") else None),
        ("tokens an epoch", f"{trained['tokens']:,}" if trained.get("tokens") else None),
        ("time in updates and evaluations", f"{seconds:,.0f} s" if seconds else None),
        ("goodput", _goodput(run.get("goodput"))),
        ("result", run.get("result")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [(name, value) for name, value in facts if value not in (None, "")]


def _goodput(fields: Mapping[str, Any] | None) -> str | None:
    return str(Goodput(*(fields[field.name] for field in dataclasses.fields(Goodput)))) if fields else None


def _best(best: Mapping[str, Any] | None) -> str | None:
    return f"{_number(best.get('loss'))} after update {best.get('step')}" if best else None


def _prediction_table(prediction: Mapping[str, Any] | None) -> list[str]:
    """Compares the predicted memory and time with the measured ones."""
    if not prediction:
        return []
    predicted, measured = prediction.get("predicted") or {}, prediction.get("measured") or {}
    rows = [
        ("memory of the fullest device", _mebibytes(predicted, "device_bytes"), _mebibytes(measured, "device_bytes")),
        ("seconds an update", *(_number(side.get("step_seconds")) or "unknown" for side in (predicted, measured))),
    ]
    body = "".join(f"<tr><td>{name}</td><td>{planned}</td><td>{real}</td></tr>" for name, planned, real in rows)
    device = html.escape(str(predicted.get("device", "")))
    head = f"<tr><th></th><th>planned for {device}</th><th>measured</th></tr>"
    return ["<h2>Plan and measurement</h2>", f"<table>{head}{body}</table>"]


def _curves(rows: Sequence[Mapping[str, Any]], total: object) -> list[str]:
    """A plot of the loss, then one of every other figure."""
    train = [row for row in rows if row.get("kind") == "train"]
    validation = [row for row in rows if row.get("kind") == "eval"]
    updates = total if isinstance(total, int) else len(train)
    keys = dict.fromkeys(key for row in rows for key in row)
    plots = [_plot("loss", train, validation, updates, loss_unit(keys), LARGE)]
    plots += [_plot(name, train, validation, updates, "", SMALL) for name in keys if name not in NO_CURVES]
    return ['<div class="plots">', *plots, "</div>"]


def _plot(
    name: str,
    train: Sequence[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    total: int,
    unit: str,
    size: tuple[int, int],
) -> str:
    """A figure under its name, with a key that has the last value of each curve; "" where there is no number."""
    sides = {"training": column(train, name), "validation": column(validation, name)}
    if name == "memory":
        largest = max((value for values in sides.values() for value in values if value is not None), default=0)
        power = min(len(UNITS) - 1, int(math.log2(max(1, largest)) // 10))
        unit = UNITS[power]
        sides = {side: [None if value is None else value / 1024**power for value in sides[side]] for side in sides}
    steps = {"training": column(train, "step"), "validation": column(validation, "step")}
    curves, smoothed = [], SmoothedLoss(total)
    if name not in EXACT and smoothed.final_span > 1:
        curves.append(Curve("", steps["training"], sides["training"], "raw"))
        sides["training"] = [smoothed.value if value is None else smoothed.update(value) for value in sides["training"]]
        label = "smoothed"
    else:
        label = "training" if any(value is not None for value in sides["validation"]) else "last"
    curves += [Curve(side, steps[side], values, side) for side, values in sides.items()]
    title = metric_title(name)
    plot = svg_plot(title, curves, unit=unit, size=size)
    last = {
        side: next((value for value in reversed(values) if value is not None), None) for side, values in sides.items()
    }
    marks = {"training": (label, "b"), "validation": ("validation", "i")}
    suffix = f" {unit}" if unit in UNITS else ""
    key = "; ".join(
        f"<{marks[side][1]}>{marks[side][0]}</{marks[side][1]}> {_number(value)}{suffix}"
        for side, value in last.items()
        if value is not None
    )
    return f'<div><h3>{html.escape(title)}</h3><p class="key">{key}</p>{plot}</div>' if plot else ""


def metric_title(name: str) -> str:
    """The title of a metric of metrics.jsonl."""
    return METRIC_NAMES.get(name) or re.sub(r"^rewards/(.+)/(mean|std)$", _reward_title, name)


def _reward_title(match: re.Match[str]) -> str:
    return f"Reward {match[1]}" if match[2] == "mean" else f"Spread of reward {match[1]}"


def loss_unit(keys: Collection[str]) -> str:
    """Returns the unit that a loss is averaged over, from the other metrics."""
    if "reward" in keys:
        return "of the policy"
    if "kl" in keys:
        return "per answer"
    return "per pair" if any(key.startswith("rewards/") for key in keys) else "nats per token"


def _recipe(text: str) -> list[str]:
    """The keys of a recipe that are not at their defaults; all of them folded."""
    if not text:
        return []
    full = f"<pre>{html.escape(text)}</pre>"
    try:
        content = yaml_text.read(text, RECIPE).value
        recipe = load_recipe(content if isinstance(content, dict) else {}, notify=silent)
    except (UserError, ValueError):
        return ["<h2>Recipe</h2>", full]
    changed = recipe.model_dump(mode="json", exclude_defaults=True)
    for name in ("stage", "method"):  # whose keys are those of a kind
        changed[name] = {"kind": getattr(recipe, name).kind, **changed.get(name, {})}
    short = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)
    folded = f"<details><summary>all keys, with the defaults</summary>{full}</details>"
    return ["<h2>Recipe</h2>", f"<pre>{html.escape(short)}</pre>", folded]


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The numbers of a metric in `rows`, None where a row has none."""
    values = [row.get(name) for row in rows]
    return [value if isinstance(value, int | float) and not isinstance(value, bool) else None for value in values]


def samples_html(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Renders each prompt, with its pictures, and its answers in order of updates."""
    answers: dict[tuple[str, ...], list[str]] = {}
    for sample in samples:
        step, text = html.escape(str(sample.get("step"))), html.escape(str(sample.get("text")))
        pictures = sample.get("pictures")
        shown = map(str, pictures if isinstance(pictures, list) else ())
        # A page that is opened anywhere asks no server for a picture.
        prompt = (str(sample.get("prompt")), *(address for address in shown if address.startswith("data:image/")))
        answers.setdefault(prompt, []).append(f'<p class="quiet">after update {step}</p><pre>{text}</pre>')
    parts = []
    for (words, *pictures), texts in answers.items():
        parts += [f"<h3>{html.escape(words)}</h3>"]
        parts += [f'<img alt="a picture of the prompt" src="{html.escape(picture)}">' for picture in pictures]
        parts += texts
    return parts


def _completions(output: pathlib.Path) -> list[str]:
    """A table of the newest rollout: each completion under its prompt, with its rewards."""
    from meshtune.runs.rollouts import newest_rollout, prompt_text  # of runs of online stages only

    rows = newest_rollout(output)
    if not rows:
        return []
    names = list(rows[0]["rewards"])
    titles = ["completion", *names, "advantage", "tokens"]
    body, prompt = "", None
    for row in rows:
        if (row.get("group"), text := prompt_text(row["prompt"])) != prompt:
            prompt = row.get("group"), text
            body += f'<tr><th colspan="{len(titles)}">{html.escape(text)}</th></tr>'
        values = [*(row["rewards"].get(name) for name in names), row["advantage"], row["tokens"]]
        cells = "".join(f"<td>{'-' if value is None else _number(value)}</td>" for value in values)
        body += f"<tr><td><pre>{html.escape(row['completion'])}</pre></td>{cells}</tr>"
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    table = f"<table>{'<tr>' + head + '</tr>'}{body}</table>"
    return [f"<h2>Completions before update {rows[0]['step']}</h2>", f'<div class="wide">{table}</div>']


def _table(facts: Sequence[tuple[str, object]]) -> str:
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in facts)
    return f"<table>{rows}</table>"


def _mebibytes(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return f"{value / 2**20:,.0f} MiB" if isinstance(value, int | float) else "unknown"


def _number(value: object) -> str | None:
    if not isinstance(value, int | float):
        return None if value is None else json.dumps(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
