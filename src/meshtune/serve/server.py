"""The process around the application: it says when it answers, and drains before it ends."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import uvicorn

from meshtune.serve.gate import Gate


class Server(uvicorn.Server):
    """Answers until SIGTERM or Ctrl-C, and then until the requests under way have their answers; later ones get 503.

    A second signal ends it at once. `ready` is called when it answers; `unanswered` requests were
    under way when it ended.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, ready: Callable[[], None]):
        super().__init__(config)
        self._gate, self._ready = gate, ready
        self.unanswered = 0

    async def main_loop(self) -> None:
        """Serves; uvicorn's own loop."""
        self._ready()
        await super().main_loop()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; called ten times a second."""
        ends = await super().on_tick(counter) or self._gate.drained
        self.unanswered = self._gate.under_way if ends else 0
        return ends

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Closes the gate at the first signal, ends at the second."""
        if self._gate.closed:
            self.should_exit = self.force_exit = True
        else:
            self._gate.close()
