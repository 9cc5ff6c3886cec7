"""The process around the application: it says when it answers, and drains before it ends."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from meshtune.serve.connection import Connection, Limits
from meshtune.serve.gate import Gate


class Server(uvicorn.Server):
    """Answers until SIGTERM or Ctrl-C, and then until the requests under way have their answers; later ones get 503.

    A second signal ends it at once. `ready` is called when it answers; `unanswered` requests were
    under way when it ended. Connections are those of serve.connection, whatever the `config` says.
    """

    def __init__(
        self, config: uvicorn.Config, gate: Gate, ready: Callable[[], None] = lambda: None, limits: Limits | None = None
    ):
        protocol: Any = functools.partial(Connection, limits=limits or Limits())
        config.http, config.ws = protocol, "none"
        super().__init__(config)
        self._gate, self._ready = gate, ready
        self._checked = time.monotonic()
        self.unanswered = 0

    async def main_loop(self) -> None:
        """Serves; uvicorn's own loop."""
        self._ready()
        await super().main_loop()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; called ten times a second."""
        if counter % 10 == 0:
            before, self._checked = self._checked, time.monotonic()
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.expire(self._checked, self._checked - before)
        ends = await super().on_tick(counter) or self._gate.drained
        self.unanswered = self._gate.under_way if ends else 0
        return ends

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Closes the gate at the first signal, ends at the second."""
        if self._gate.closed:
            self.should_exit = self.force_exit = True
        else:
            self._gate.close()
