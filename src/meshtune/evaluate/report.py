"""The report of an evaluation: differences in sentences, tables, plots and answers, as Markdown and HTML."""

from __future__ import annotations

import base64
import collections
import dataclasses
import html
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.evaluate.compare import Outcome, general_differences, professional_differences
from meshtune.evaluate.folder import HTML, MARKDOWN, replace
from meshtune.evaluate.predict import Predictions
from meshtune.evaluate.statistics import ENOUGH, RESAMPLES, TOO_FEW, Difference, Overlap
from meshtune.evaluate.tasks import averages
from meshtune.generate.pictures import prompt_words
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


DIFFERENCES, LOSSES = "differences.png", "losses.png"
SHOWN = 12  # answers side by side


@dataclasses.dataclass(frozen=True)
class Table:
    """A table under a heading, with a line below it."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a report: `warnings` first, then `findings`, pictures by file name, tables, answers side by
    side."""

    title: str
    warnings: list[str]
    findings: list[str]
    pictures: list[str]
    tables: list[Table]


def write_report(
    folder: pathlib.Path,
    title: str,
    outcomes: Mapping[str, Outcome],
    *,
    overlap: Overlap | None = None,
    protocol: str,
    seed: int = 0,
) -> Report:
    """Writes report.md, report.html and the plots of one model, or of two: before and after."""
    findings, tables, pictures = [], [], []
    warnings = [str(overlap)] if overlap is not None and overlap.shared else []
    if overlap is not None and not overlap.shared:
        findings.append(str(overlap))
    if len(outcomes) == 2:
        (before_name, before), (after_name, after) = outcomes.items()
        professional: list[Difference] = []
        if before.predictions and after.predictions:
            professional = professional_differences(before.predictions, after.predictions, seed)
            tables.append(_differences("Your records", before_name, after_name, [("", item) for item in professional]))
            if draw_losses(folder / LOSSES, before.predictions, after.predictions):
                pictures.append(LOSSES)
        general = general_differences(before.tasks, after.tasks, seed)
        if general:
            named = [(name, item) for name, listed in general.items() for item in listed]
            tables.append(_differences("Tasks", before_name, after_name, named))
        findings += sentences(professional, general)
        if any(item.verdict != TOO_FEW for items in (professional, *general.values()) for item in items):
            about = "draws of the samples. Unclear: the interval holds 0, or p is above 0.05."
            findings.append(f"Intervals of 98%: {RESAMPLES:,} {about}")
        draw_differences(folder / DIFFERENCES, professional, general)
        pictures.insert(0, DIFFERENCES)
    for name, outcome in outcomes.items():
        tables += _categories(name, outcome)
        if len(outcomes) == 1:
            tables += _metrics(outcome)
    tables += _answers(outcomes)
    findings.append(f"Protocol of the tasks: {protocol}.")
    report = Report(title, warnings, findings, pictures, tables)
    replace(folder / MARKDOWN, markdown(report))
    replace(folder / HTML, page(report, folder))
    return report


def sentences(professional: Sequence[Difference], general: Mapping[str, Sequence[Difference]]) -> list[str]:
    """Gains and losses, as sentences."""
    named = [("your records", item) for item in professional]
    named += [(name, item) for name, listed in general.items() for item in listed]
    lines = []
    for verdict, text in (("gained", "Gained"), ("lost", "LOST")):
        for name, item in named:
            if item.verdict == verdict:
                lines.append(
                    f"{text}: {name}, {item.metric}, from {item.before:.4g} to {item.after:.4g} ({_interval(item)})."
                )
    counts = collections.Counter(item.verdict for _, item in named)
    if not named or counts["lost"]:
        return lines
    if counts[TOO_FEW] == len(named):
        samples = max(item.samples for _, item in named)
        return [f"Too few to say: no metric has more than {samples} samples, and a verdict needs {ENOUGH}."]
    numbers = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("gained", "unclear", "same", TOO_FEW) if counts[verdict]
    )
    return [*lines, f"No metric is shown to be worse than before. Of {len(named)}: {numbers}."]


def _interval(item: Difference) -> str:
    p = "" if item.p is None else f", McNemar p = {item.p:.2g}"
    return f"difference {item.change:+.4g}, 98% interval {item.low:+.4g} to {item.high:+.4g}{p}"


def _differences(title: str, before: str, after: str, named: Sequence[tuple[str, Difference]]) -> Table:
    head = ("metric", "verdict", before, after, "difference", "98% interval", "better / worse / samples", "McNemar p")
    rows = [
        (
            f"{name} {item.metric} {'↑' if item.higher_is_better else '↓'}".strip(),
            item.verdict,
            f"{item.before:.4g}",
            f"{item.after:.4g}",
            f"{item.change:+.3g}",
            "" if item.verdict == TOO_FEW else f"{item.low:+.3g} to {item.high:+.3g}",
            f"{item.wins} / {item.losses} / {item.samples}",
            "" if item.p is None or item.verdict == TOO_FEW else f"{item.p:.2g}",
        )
        for name, item in named
    ]
    note = f"↑: higher is better, ↓: lower is better. {TOO_FEW.capitalize()}: fewer than {ENOUGH} samples."
    filled = [index for index in range(len(head)) if any(row[index] for row in rows)]
    head, *rows = [tuple(row[index] for index in filled) for row in [head, *rows]]
    return Table(title, head, rows, note)


def _metrics(outcome: Outcome) -> list[Table]:
    """The numbers of a model that is compared with none."""
    tables = []
    if outcome.predictions:
        totals = [(name, _number(value)) for name, value in outcome.predictions.totals.items()]
        tables.append(Table("Your records", ("metric", "value"), totals))
    rows = [
        (result.name, name.replace(",none", ""), _number(value), str(len(result.samples)))
        for result in outcome.tasks
        for name, value in result.metrics.items()
    ]
    return [*tables, Table("Tasks", ("task", "metric", "value", "samples"), rows)] if rows else tables


def _categories(name: str, outcome: Outcome) -> list[Table]:
    return [
        Table(f"{benchmark}, averages by category: {name}", tuple(row), [tuple(f"{v:.4f}" for v in row.values())])
        for benchmark, row in averages(outcome.tasks).items()
    ]


def _answers(outcomes: Mapping[str, Outcome]) -> list[Table]:
    """The first answers next to each other and to the data's own."""
    sides = {name: outcome.predictions.rows for name, outcome in outcomes.items() if outcome.predictions}
    if not sides:
        return []
    first = next(iter(sides.values()))[:SHOWN]
    rows = [
        (_question_of(row["prompt"]), row["reference"], *(rows[number]["answer"] for rows in sides.values()))
        for number, row in enumerate(first)
    ]
    return [
        Table("Answers", ("asked", "the data's answer", *sides), rows, "All are in predictions.jsonl of each model.")
    ]


def _question_of(prompt: object) -> str:
    return prompt_words(prompt[-1]["content"]) if isinstance(prompt, list) else str(prompt)


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [f"# {report.title}", ""]
    lines += [f"> **{warning}**\n" for warning in report.warnings]
    lines += [f"- {text}" for text in report.findings]
    lines += ["", *(f"![{name}]({name})" for name in report.pictures)]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", _row(table.head), _row(["---"] * len(table.head))]
        lines += [_row([_cell(text) for text in row]) for row in table.rows]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


SHORT = 40  # characters of a cell that is not broken into lines
LONG = 400  # characters, or LINES, of a cell that is folded
LINES = 10

STYLE = """:root{color-scheme:light dark;--ink:#1f2933;--paper:#fff;--line:#e4e7eb;--quiet:#66727f;--lost:#c2410c;
--gained:#1b7f4b;--warning:#fff1ec}@media(prefers-color-scheme:dark){:root{--ink:#e4e7eb;--paper:#15191e;--line:#323a43;
--quiet:#9aa5b1;--lost:#ff8a5c;--gained:#5ac78d;--warning:#3a221a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1100px;margin:2rem auto;
padding:0 1rem;overflow-wrap:anywhere}table{border-collapse:collapse;width:100%;margin:.6rem 0}
td,th{border-bottom:1px solid var(--line);padding:.35rem .6rem;text-align:left;vertical-align:top;overflow-wrap:normal}
td{font-variant-numeric:tabular-nums}td:first-child,td:nth-child(2){min-width:7rem}
td.number{white-space:nowrap}td.text{white-space:pre-wrap;overflow-wrap:anywhere;min-width:12rem}
.long{display:flex;flex-direction:column-reverse}.long>div{display:-webkit-box;-webkit-box-orient:vertical;
-webkit-line-clamp:10;overflow:hidden}.long>[open]+div{display:block}summary{color:var(--quiet);cursor:pointer}
img{display:block;max-width:100%;background:#fff;border-radius:6px;margin:.8rem 0}
.warning{background:var(--warning);border-left:4px solid var(--lost);padding:.6rem 1rem;font-weight:600}
.lost{color:var(--lost);font-weight:600}.gained{color:var(--gained);font-weight:600}.note{color:var(--quiet);font-size:13px}.wide{overflow-x:auto}"""


def page(report: Report, folder: pathlib.Path) -> str:
    """The report as one HTML page with its pictures, which asks nothing of any other host."""
    parts = [f"<h1>{html.escape(report.title)}</h1>"]
    parts += [f'<p class="warning">{html.escape(text)}</p>' for text in report.warnings]
    parts.append("<ul>" + "".join(f"<li{_class(text)}>{html.escape(text)}</li>" for text in report.findings) + "</ul>")
    for name in report.pictures:
        data = base64.b64encode((folder / name).read_bytes()).decode()
        parts.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
    for table in report.tables:
        head = "".join(f"<th>{html.escape(text)}</th>" for text in table.head)
        rows = "".join(
            "<tr>" + "".join(f"<td{_class(text, cell=True)}>{_fold(text)}</td>" for text in row) + "</tr>"
            for row in table.rows
        )
        parts.append(f'<h2>{html.escape(table.title)}</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div>')
        parts.append(f'<p class="note">{html.escape(table.note)}</p>' if table.note else "")
    title = html.escape(report.title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _fold(text: str) -> str:
    """The text of a cell; of a long one the first LINES lines, and a way to unfold it."""
    content = html.escape(text)
    if len(text) <= LONG and text.count("\n") < LINES:
        return content
    return f'<div class="long"><details><summary>whole text</summary></details><div>{content}</div></div>'


def _class(text: str, *, cell: bool = False) -> str:
    """Colours a verdict, and the sentences that begin with one; lets long texts of cells break into lines."""
    for name in ("lost", "gained"):
        if text == name or text.lower().startswith(f"{name}:"):
            return f' class="{name}"'
    if not cell:
        return ""
    if len(text) > SHORT or "\n" in text:
        return ' class="text"'
    return ' class="number"' if text[:1].isdigit() or text[:1] in ("+", "-") else ""
