"""The process around the application: connections with limits, and a drain before the end."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshtune.serve.guard import ApiError, Gate


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on connections. A body may take `body_seconds`, and a second more for every `body_rate` bytes of it (as
    Apache's mod_reqtimeout has them). `read_seconds`: of an answer that the client does not read."""

    connections: int = 900  # below the 1,024 files that a process may open by default
    header_seconds: float = 20.0
    body_seconds: float = 30.0
    body_rate: int = 500
    read_seconds: float = 120.0


class Connection(H11Protocol):
    """uvicorn's connection with limits. `expire` is to be called once a second.

    When there are more connections than `limits.connections`, one whose request is not whole makes room for a new one;
    where every request is under way, the new one gets 503.
    """

    def __init__(self, *args: Any, limits: Limits, **options: Any):
        super().__init__(*args, **options)
        self._limits = limits
        self._since: float | None = None  # the time since which a request is awaited; None: it is whole, or none began
        self._received = 0
        self._blocked: float | None = None  # the time since which the client does not read

    def connection_made(self, transport: Any) -> None:
        """Lets a new connection in, or refuses it."""
        super().connection_made(transport)
        self._since = time.monotonic()
        if len(self.connections) > self._limits.connections:
            neighbours: list[Any] = [peer for peer in self.connections if peer is not self]
            oldest = min(neighbours, key=lambda peer: (peer.importance, peer.age))
            if oldest.importance < 3:
                oldest.transport.close()
                self.connections.discard(oldest)
            else:
                self._respond(503, f"the server has {self._limits.connections} connections, and takes no more")

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        if self._since is None:
            self._since, self._received = time.monotonic(), 0
        self._received += len(data)
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._since = None
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._since, self._received = time.monotonic(), 0

    @property
    def importance(self) -> int:
        """The rank among those that make room: half a header, nothing, half a body, a whole request."""
        if self.conn.their_state is h11.SEND_BODY:
            return 2
        if self.conn.their_state is not h11.IDLE:
            return 3
        return 1 if self._since is None else 0

    @property
    def age(self) -> float:
        """The time since which a request is awaited."""
        return self._since or 0.0

    def expire(self, now: float, elapsed: float) -> None:
        """Ends the connection if the client is too slow; `elapsed` seconds went by since the last call."""
        blocked = self.flow.write_paused or self.transport.is_closing()
        self._blocked = (self._blocked or now) if blocked else None
        if self._blocked is not None and now - self._blocked > self._limits.read_seconds:
            self.transport.abort()
        if self._since is None or self.transport.is_closing():
            return
        if self.flow.read_paused:  # the server is slow, not the client
            self._since += elapsed
        if self.conn.their_state is not h11.SEND_BODY:
            if now - self._since > self._limits.header_seconds:
                self.transport.close()  # there is no request yet that could be answered
            return
        seconds = self._limits.body_seconds + self._received / self._limits.body_rate
        if now - self._since > seconds:
            self._respond(408, f"the body was not complete after {seconds:.0f} seconds")

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP."""
        self._respond(400, "this is no valid HTTP request, or it has more than 16 KiB of headers")

    def _respond(self, status: int, message: str) -> None:
        """Answers in place of the application, and closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(status, message).body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # the application hears that the client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Server(uvicorn.Server):
    """Answers until SIGTERM or Ctrl-C, and then until the requests under way have their answers; later ones get 503.

    A second signal ends it at once, and so does `has_ended`. `ready` is called when it answers; `unanswered` requests
    were under way when it ended. Connections are those of serve.connection, whatever the `config` says.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        ready: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
        has_ended: Callable[[], bool] = lambda: False,
    ):
        protocol: Any = functools.partial(Connection, limits=limits or Limits())
        config.http, config.ws = protocol, "none"
        super().__init__(config)
        self._gate, self._ready, self._has_ended = gate, ready, has_ended
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
        ends = await super().on_tick(counter) or self._gate.drained or self._has_ended()
        self.unanswered = self._gate.under_way if ends else 0
        return ends

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Closes the gate at the first signal, ends at the second."""
        if self._gate.closed:
            self.should_exit = self.force_exit = True
        else:
            self._gate.close()
