"""console.log: a copy of a run's console output, without colours and progress bars."""

from __future__ import annotations

import contextlib
import io
import pathlib
import sys
from collections.abc import Iterator

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.text import Text

from meshtune.runs.output import CONSOLE_LOG
from meshtune.terminal import WIDE


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
