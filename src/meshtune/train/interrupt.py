"""Ctrl-C and SIGTERM as a request: the loop finishes its update, saves, and ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """`received` is the signal's number once one has come, else None. A second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Takes over SIGINT and SIGTERM for a block. In a thread other than the main one nothing can be taken over."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
