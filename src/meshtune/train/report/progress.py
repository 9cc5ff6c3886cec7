"""The console of a run: its progress and its log."""

from __future__ import annotations

import collections
import contextlib
import io
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from meshtune.runs.output import CONSOLE_LOG
from meshtune.setup.memory import memory_kind, size_in_words
from meshtune.terminal import WIDE, in_notebook
from meshtune.train.report.events import Evaluated, Event, Generating, Note, Sampled, Started, Stepped, Stopped
from meshtune.train.report.plot import SmoothedLoss


class ConsoleLog(RenderHook):
    """Copies everything a console prints to a file; buffers it until `open`, when the output directory exists."""

    def __init__(self) -> None:
        self._console = _plain(io.StringIO())

    def open(self, output: pathlib.Path) -> None:
        """Opens `output`/console.log for appending, and writes the buffered text to it."""
        buffer = self._console.file
        assert isinstance(buffer, io.StringIO)
        file = (output / CONSOLE_LOG).open("a", encoding="utf-8", buffering=1)
        file.write(buffer.getvalue())
        self._console = _plain(file)

    def print(self, line: str) -> None:
        """Writes a line to the log only."""
        self._console.print(line, markup=False, soft_wrap=True)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Rich's hook: the console calls it with everything it is about to print."""
        for renderable in renderables:
            if isinstance(renderable, Text):  # carries the end of its line; printed without wrapping
                self._console.print(renderable, end=renderable.end, soft_wrap=True)
            elif not isinstance(renderable, Control):
                self._console.print(renderable)
        return renderables

    def close(self) -> None:
        self._console.file.close()


@contextlib.contextmanager
def log_console(console: Console) -> Iterator[ConsoleLog]:
    """Logs what `console` prints within the block, and the exception that leaves it."""
    log = ConsoleLog()
    console.push_render_hook(log)
    try:
        yield log
    finally:
        if (error := sys.exc_info()[1]) is not None:
            log.print(f"{type(error).__name__}: {error}")
        console.pop_render_hook()
        log.close()


def _plain(file: io.TextIOBase) -> Console:
    return Console(file=file, width=WIDE, color_system=None, highlight=False, force_terminal=False)  # pyright: ignore[reportArgumentType]


WINDOW = 30  # updates that the rate is averaged over
LINE_SECONDS = 15.0  # between lines without a terminal, and in the log


class Bar(Protocol):
    """A bar that is redrawn in its place. `fields` has the texts under the names of `ProgressBar`."""

    def update(self, completed: int | None, fields: Mapping[str, str]) -> None: ...

    def stop(self) -> None: ...


class TerminalBar:
    """The bar of a terminal."""

    def __init__(self, console: Console, start: Started, *, headline: bool):
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("smoothed loss [bold]{task.fields[loss]}"),
            *([TextColumn("{task.fields[metrics]}")] if headline else []),
            TextColumn("{task.fields[rate]}"),
            TextColumn("[dim]{task.fields[memory]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=8,
        )
        self._bar.start()
        self._task = self._bar.add_task(
            "training", total=start.total, completed=start.done, loss="-", metrics="", rate="", memory=""
        )

    def update(self, completed: int | None, fields: Mapping[str, str]) -> None:
        self._bar.update(self._task, completed=completed, **fields)  # pyright: ignore[reportArgumentType]

    def stop(self) -> None:
        self._bar.stop()


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
        self._bar: Bar | None = None
        self._total = 0
        self._recent: collections.deque[Stepped] = collections.deque(maxlen=WINDOW)
        self._last_line = 0.0

    def receive(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case Stepped():
                self._recent.append(event)
                fields = self._fields()
                if self._bar is not None:
                    self._bar.update(event.step, fields)
                if time.monotonic() - self._last_line > LINE_SECONDS or event.step in (1, self._total):
                    self._last_line = time.monotonic()
                    self._print_line(f"update {event.step}/{self._total}  smoothed loss " + "  ".join(fields.values()))
            case Generating():
                if self._bar is not None:
                    self._bar.update(None, {"rate": f"generating {event.done}/{event.total}"})
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
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print_line(self, line: str) -> None:
        if self._bar is None:
            self._console.print(line, highlight=False, soft_wrap=True)
        elif self._log is not None:
            self._log.print(line)

    def _start(self, event: Started) -> None:
        self._total = event.total
        if self._console.is_terminal:
            self._bar = TerminalBar(self._console, event, headline=bool(self._headline))
        elif not self._console.quiet and in_notebook():
            from meshtune.train.report.notebook import NotebookBar

            self._bar = NotebookBar(event)

    def _fields(self) -> dict[str, str]:
        timed = [event for event in self._recent if not event.slow]
        rate = sum(event.tokens for event in timed) / (sum(event.seconds for event in timed) or 1.0)
        loss = self._loss.value
        metrics = {"metrics": self._headline_means()} if self._headline else {}
        rollouts = sum(event.rollout_seconds for event in self._recent) / len(self._recent)
        return {
            "loss": "-" if loss is None else f"{loss:.4f}",
            **metrics,
            "rate": (f"{rate:,.0f} tok/s" if timed else "- tok/s") + (f"  rollout {rollouts:.1f} s" * (rollouts > 0)),
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
