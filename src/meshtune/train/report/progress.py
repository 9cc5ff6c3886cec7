"""The run on the screen: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import time
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

from meshtune.setup.memory import size_in_words
from meshtune.train.report.events import Evaluated, Event, Note, Sampled, Started, Stepped, Stopped

WINDOW = 30  # updates that rates and the shown loss are averaged over
LINE_SECONDS = 15.0  # between lines where there is no terminal


class ProgressBar:
    """The sink that shows a run."""

    def __init__(self, console: Console):
        self._console = console
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
                if self._progress is not None:
                    fields: dict[str, Any] = self._fields()
                    self._progress.update(self._task, completed=event.step, **fields)
                elif time.monotonic() - self._last_line > LINE_SECONDS or event.step in (1, self._total):
                    self._last_line = time.monotonic()
                    loss, rate, memory = self._fields().values()
                    line = f"update {event.step}/{self._total}  loss {loss}  {rate}  {memory}"
                    self._console.print(line, highlight=False)
            case Evaluated():
                accuracy = event.metrics.get("accuracy")
                words = f", accuracy {accuracy:.1%}" if accuracy is not None else ""
                best = "  [green]best so far[/]" if event.best else ""
                self._console.print(
                    f"[bold]validation[/] after {event.step}: loss {event.loss:.4f}{words}{best}", highlight=False
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

    def _start(self, event: Started) -> None:
        self._total = event.total
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
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
            "training", total=event.total, completed=event.done, loss="-", rate="", memory=""
        )

    def _fields(self) -> dict[str, str]:
        weight = sum(one.learned for one in self._recent) or 1
        loss = sum(one.loss * one.learned for one in self._recent) / weight
        seconds = sum(one.seconds for one in self._recent) or 1.0
        rate = sum(one.tokens for one in self._recent) / seconds
        return {"loss": f"{loss:.4f}", "rate": f"{rate:,.0f} tok/s", "memory": size_in_words(self._recent[-1].memory)}
