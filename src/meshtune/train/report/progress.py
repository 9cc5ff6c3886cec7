"""Displays a run: a progress bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from meshtune.setup.memory import memory_kind, size_in_words
from meshtune.train.report.console_log import ConsoleLog
from meshtune.train.report.events import Evaluated, Event, Note, Sampled, Started, Stepped, Stopped
from meshtune.train.report.smoothing import SmoothedLoss

WINDOW = 30  # updates that the rate is averaged over
LINE_SECONDS = 15.0  # between lines without a terminal, and in the log


class ProgressBar:
    """The sink that displays a run.

    `loss` is the smoothed loss to show, `log` gets lines in place of the bar, and `headline` lists further metrics to
    show as (metric, label), which are averaged over the last updates.
    """

    def __init__(
        self,
        console: Console,
        loss: SmoothedLoss,
        log: ConsoleLog | None = None,
        *,
        headline: Sequence[tuple[str, str]] = (),
    ):
        self._console, self._loss, self._log, self._headline = console, loss, log, headline
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._recent: collections.deque[Stepped] = collections.deque(maxlen=WINDOW)
        self._last_line = 0.0

    def receive(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case Stepped():
                self._recent.append(event)
                fields: dict[str, Any] = self._fields()
                if self._progress is not None:
                    self._progress.update(self._task, completed=event.step, **fields)
                if time.monotonic() - self._last_line > LINE_SECONDS or event.step in (1, self._total):
                    self._last_line = time.monotonic()
                    self._print_line(f"update {event.step}/{self._total}  smoothed loss " + "  ".join(fields.values()))
            case Evaluated():
                headline = self._headline or (("accuracy", "accuracy"),)
                shown = (
                    _headline_text(label, event.metrics[name]) for name, label in headline if name in event.metrics
                )
                metrics_text = "".join(f", {text}" for text in shown)
                best = "  [green]best so far[/]" if event.best else ""
                self._console.print(
                    f"[bold]validation[/] after {event.step}: loss {event.loss:.4f}{metrics_text}{best}",
                    highlight=False,
                )
            case Sampled():
                head = Text.assemble((f"sample after {event.step}  ", "bold magenta"), (event.prompt, "dim"))
                self._console.print(head)
                self._console.print(Text(event.text.strip() or "(nothing)"), style="magenta")
            case Note():
                self._console.print(Text(event.text, style="yellow"))
            case Stopped():
                self.close()
                if event.reason:
                    self._console.print(Text(f"stopped after update {event.step}: {event.reason}", style="yellow"))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print_line(self, line: str) -> None:
        if self._progress is None:
            self._console.print(line, highlight=False, soft_wrap=True)
        elif self._log is not None:
            self._log.print(line)

    def _start(self, event: Started) -> None:
        self._total = event.total
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("smoothed loss [bold]{task.fields[loss]}"),
            *([TextColumn("{task.fields[metrics]}")] if self._headline else []),
            TextColumn("{task.fields[rate]}"),
            TextColumn("[dim]{task.fields[memory]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=8,
        )
        self._progress.start()
        self._task = self._progress.add_task(
            "training", total=event.total, completed=event.done, loss="-", metrics="", rate="", memory=""
        )

    def _fields(self) -> dict[str, str]:
        timed = [event for event in self._recent if not event.slow]
        rate = sum(event.tokens for event in timed) / (sum(event.seconds for event in timed) or 1.0)
        loss = self._loss.value
        metrics = {"metrics": self._headline_means()} if self._headline else {}
        return {
            "loss": "-" if loss is None else f"{loss:.4f}",
            **metrics,
            "rate": f"{rate:,.0f} tok/s" if timed else "- tok/s",
            "memory": f"{memory_kind()} {size_in_words(self._recent[-1].memory)}",
        }

    def _headline_means(self) -> str:
        weight = sum(event.learned for event in self._recent) or 1
        texts = []
        for name, label in self._headline:
            total = sum(event.metrics.get(name, 0.0) * event.learned for event in self._recent)
            texts.append(_headline_text(label, total / weight))
        return "  ".join(texts)


def _headline_text(label: str, value: float) -> str:
    return f"{label} {value:.1%}" if label == "accuracy" else f"{label} {value:.3f}"
