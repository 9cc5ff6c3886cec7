"""A process's side of the line: it comes to the hub, exchanges small values, and hears why the job ends."""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from meshtune.errors import UserError
from meshtune.mesh.peers import COORDINATOR, Place
from meshtune.mesh.wire import BEAT, GREETING, SILENCE, Ending, lost, messages, quick, send


class Member:
    """One process's connection to the hub. `on_end` is called, in a thread, with the reason when the job ends.

    Until `on_end` is set, and while `exchange` waits, the reason is raised there instead.
    """

    def __init__(self, place: Place, address: tuple[str, int], timeout: float):
        self.place, self.host = place, socket.gethostname()
        self.on_end: Callable[[Ending], None] | None = None
        self.ending: Ending | None = None
        self.ended = threading.Event()
        self.leaving = False
        self._lock, self._got = threading.Lock(), queue.Queue[dict[str, Any]]()
        self._waiting = False
        self._line = connect(place, address, timeout)
        # How many is what this process was told: the hub compares.
        hello = {"greeting": GREETING, "process": place.process, "processes": place.processes, "job": place.job}
        send(self._line, self._lock, {"t": "hello", **hello, "host": self.host, "pid": os.getpid()})
        threading.Thread(target=self._read, name="meshtune-member", daemon=True).start()
        threading.Thread(target=self._beat, name="meshtune-beat", daemon=True).start()

    def exchange(self, tag: str, value: Any, timeout: float) -> list[Any]:
        """Every process's `value` (JSON), in order, once all have called with the same `tag`.

        Raises: UserError if the job ends meanwhile, or not all have called in `timeout` seconds.
        """
        self._waiting = True
        send(self._line, self._lock, {"t": "put", "tag": tag, "value": value})
        try:
            while True:
                message = self._got.get(timeout=timeout)
                if message["t"] == "end":
                    assert self.ending is not None
                    raise self.ending.error()
                if message["tag"] == tag:
                    return message["value"]
        except queue.Empty:
            raise UserError(
                f"not every process came to '{tag}' in {timeout:.0f} s",
                where=f"process {self.place.process} of {self.place.processes} on {self.host}",
                fix="look at the logs of the processes that are late",
            ) from None
        finally:
            self._waiting = False

    def fail(self, ending: Ending) -> None:
        """Tells every other process that this one cannot go on; returns when the hub has passed it on."""
        self.leaving = True
        if self.ending is None and send(self._line, self._lock, {"t": "failed", "ending": dataclasses.asdict(ending)}):
            self.ended.wait(5.0)
        self.close()

    def close(self) -> None:
        """Leaves; nothing that happens to the job afterwards concerns this process."""
        self.leaving = True
        send(self._line, self._lock, {"t": "bye"})

    def _read(self) -> None:
        self._line.settimeout(SILENCE)
        for message in messages(self._line):
            if message["t"] == "got":
                self._got.put(message)
            elif message["t"] == "end":
                fields = {name: value for name, value in message.items() if name != "t"}
                self._end(Ending(**fields))
                return
        host, _ = self.place.address
        why = "its connection closed or fell silent: it was killed, crashed, or its host went down"
        self._end(lost(0, self.place.processes, host, why))

    def _end(self, ending: Ending) -> None:
        self.ending = ending
        self.ended.set()
        self._got.put({"t": "end"})
        if self.on_end is not None and not self.leaving and not self._waiting:
            self.on_end(ending)

    def _beat(self) -> None:
        while not self.leaving and not self.ended.is_set():
            time.sleep(BEAT)
            send(self._line, self._lock, {"t": "beat"})


def connect(place: Place, address: tuple[str, int], timeout: float) -> socket.socket:
    """A connection to the coordinator, tried again until `timeout` seconds have gone. Raises UserError."""
    began, pause, reason = time.monotonic(), 0.1, "it was not tried"
    while True:
        left = timeout - (time.monotonic() - began)
        if left <= 0:
            break
        try:
            line = socket.create_connection(address, timeout=min(10.0, left))
            quick(line)
            return line
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(max(0.0, min(pause, timeout - (time.monotonic() - began))))
        pause = min(2.0, pause * 1.5)
    host, port = address
    raise UserError(
        f"process {place.process} of {place.processes} could not reach the coordinator at {host}:{port} in "
        f"{timeout:.0f} s: {reason}",
        where=f"host {socket.gethostname()}, launched by {place.launcher}",
        fix=f"check that process 0 was started on {host}, that this host resolves that name (getent hosts {host}) and "
        f"that no firewall closes port {port} between them; {COORDINATOR}=host:port names another address",
    )
