"""report.html: a run as one page, without a server or a script. What a record or a model says is escaped."""

from __future__ import annotations

import html
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.digests import DamagedError
from meshtune.runs.output import RECIPE, read_run
from meshtune.train.report.metrics_log import METRICS, SAMPLES, TIMINGS, read
from meshtune.train.report.smoothing import SmoothedLoss
from meshtune.train.report.svg_plot import Curve, svg_plot

REPORT = "report.html"
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
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--quiet); } .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke: var(--train); }
.raw { opacity: .35; stroke-width: 1; } polyline.validation { stroke: var(--validation); }
circle { fill: var(--validation); }
.key { color: var(--quiet); font-size: .9rem; }
.key b { color: var(--train); } .key i { color: var(--validation);
  font-style: normal; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1rem .2rem 0;
  border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre { background: var(--code); padding: .8rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
"""


def write_report(output: pathlib.Path) -> None:
    """Writes report.html of the run in `output`, replacing the file atomically."""
    draft = output / f".{REPORT}.partial"
    draft.write_text(report_html(output), encoding="utf-8")
    os.replace(draft, output / REPORT)


def report_html(output: pathlib.Path) -> str:
    """The page of a run, from its files as they are: a run that still goes on, or lost some of them, has one too."""
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
    parts = [f"<h1>{title}</h1>", _table(_facts(run, rows)), *_compared(run.get("prediction"))]
    parts += ["<h2>Curves</h2>", *_curves(rows, run.get("total"))] if rows else []
    parts += ["<h2>Samples</h2>", *_samples(samples)] if samples else []
    parts += ["<h2>Recipe</h2>", f"<pre>{html.escape(recipe)}</pre>"] if recipe else []
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
        ("result", run.get("result")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [(name, value) for name, value in facts if value not in (None, "")]


def _best(best: Mapping[str, Any] | None) -> str | None:
    return f"{_number(best.get('loss'))} after update {best.get('step')}" if best else None


def _compared(prediction: Mapping[str, Any] | None) -> list[str]:
    """What was planned beside what was measured."""
    if not prediction:
        return []
    predicted, measured = prediction.get("predicted") or {}, prediction.get("measured") or {}
    rows = [
        ("memory of the fullest device", _mebibytes(predicted, "device_bytes"), _mebibytes(measured, "device_bytes")),
        ("seconds an update", _number(predicted.get("step_seconds")), _number(measured.get("step_seconds"))),
    ]
    body = "".join(f"<tr><td>{name}</td><td>{planned}</td><td>{real}</td></tr>" for name, planned, real in rows)
    device = html.escape(str(predicted.get("device", "")))
    head = f"<tr><th></th><th>planned for {device}</th><th>measured</th></tr>"
    return ["<h2>Plan and measurement</h2>", f"<table>{head}{body}</table>"]


def _curves(rows: Sequence[Mapping[str, Any]], total: object) -> list[str]:
    """A plot of the loss, then one of every other figure."""
    train = [row for row in rows if row.get("kind") == "train"]
    validation = [row for row in rows if row.get("kind") == "eval"]
    smoothed = SmoothedLoss(total if isinstance(total, int) else len(train))
    mean = [smoothed.update(row["loss"]) for row in train]
    loss = [
        Curve("each update", _column(train, "step"), _column(train, "loss"), "raw"),
        Curve("training", _column(train, "step"), mean, "training"),
        Curve("validation", _column(validation, "step"), _column(validation, "loss"), "validation"),
    ]
    key = '<p class="key"><b>training</b>, smoothed and by update; <i>validation</i></p>'
    plots = [f"<div><h3>Loss</h3>{key}{svg_plot('Loss', loss)}</div>"]
    for name in dict.fromkeys(key for row in rows for key in row if key not in NO_CURVES):
        curves = [
            Curve("training", _column(train, "step"), _column(train, name), "training"),
            Curve("validation", _column(validation, "step"), _column(validation, name), "validation"),
        ]
        plot = svg_plot(name, curves)
        plots += [f"<div><h3>{html.escape(name)}</h3>{plot}</div>"] if plot else []
    return ['<div class="plots">', *plots, "</div>"]


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    values = [row.get(name) for row in rows]
    return [value if isinstance(value, int | float) and not isinstance(value, bool) else None for value in values]


def _samples(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each prompt with what was said to it, in order of updates."""
    parts = []
    for prompt in dict.fromkeys(str(sample.get("prompt")) for sample in samples):
        parts.append(f"<h3>{html.escape(prompt)}</h3>")
        for sample in samples:
            if str(sample.get("prompt")) == prompt:
                step, text = html.escape(str(sample.get("step"))), html.escape(str(sample.get("text")))
                parts.append(f'<p class="quiet">after update {step}</p><pre>{text}</pre>')
    return parts


def _table(facts: Sequence[tuple[str, object]]) -> str:
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in facts)
    return f"<table>{rows}</table>"


def _mebibytes(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return f"{value / 2**20:,.0f} MiB" if isinstance(value, int | float) else "unknown"


def _number(value: object) -> str | None:
    return f"{value:.4g}" if isinstance(value, int | float) else (None if value is None else json.dumps(value))
