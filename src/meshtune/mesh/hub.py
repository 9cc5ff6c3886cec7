"""Process 0's side of the line: takes in the members, hands values round, and tells all why the job ends."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from typing import Any

from meshtune.errors import UserError
from meshtune.mesh.peers import COORDINATOR, Place
from meshtune.mesh.wire import BEAT, GREETING, SILENCE, Ending, lost, messages, quick, send


@dataclasses.dataclass
class _Seat:
    """A member as the hub knows it."""

    process: int
    host: str
    pid: int
    line: socket.socket
    heard: float
    left: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Hub:
    """Process 0's side: takes in the members, hands values round, and tells all why the job ends."""

    def __init__(self, place: Place):
        self.place, self.secret = place, secrets.token_hex(8)
        host, port = place.address
        try:
            self.server = socket.create_server(("", port), dualstack_ipv6=socket.has_dualstack_ipv6(), family=_family())
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen on port {port}: {error.strerror}",
                where=f"host {socket.gethostname()}, coordinator {host}:{port}",
                fix=f"another process 0 of this job, or another program, has it; end that, or set {COORDINATOR} "
                "to another port for every process",
            ) from None
        self.lock = threading.Lock()
        self.seats: dict[int, _Seat] = {}
        self.values: dict[str, dict[int, Any]] = {}
        self.started = self.over = False
        threading.Thread(target=self._accept, name="meshtune-hub", daemon=True).start()
        threading.Thread(target=self._beat, name="meshtune-hub-beat", daemon=True).start()

    def missing(self) -> list[int]:
        """Processes that have not come yet."""
        with self.lock:
            return [number for number in range(self.place.processes) if number not in self.seats]

    def end(self, ending: Ending) -> None:
        """Tells every member; only the first reason counts."""
        with self.lock:
            if self.over:
                return
            self.over = True
            seats = list(self.seats.values())
        for seat in seats:
            send(seat.line, seat.lock, {"t": "end", **dataclasses.asdict(ending)})

    def close(self, wait: float = 5.0) -> None:
        """Waits until every member has left, or `wait` seconds, then closes."""
        until = time.monotonic() + wait
        while time.monotonic() < until and not all(seat.left for seat in list(self.seats.values())):
            time.sleep(0.02)
        self.over = True
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with contextlib.closing(line):
            line.settimeout(SILENCE)
            quick(line)
            heard = messages(line)
            seat = self._greet(line, next(heard, None))
            if seat is None:
                return
            for message in heard:
                seat.heard = time.monotonic()
                if message["t"] == "put":
                    self._put(seat.process, message["tag"], message["value"])
                elif message["t"] == "failed":
                    self.end(Ending(**message["ending"]))
                elif message["t"] == "bye":
                    break
            else:
                self._lost(seat, "its connection closed: it was killed, crashed, or its host went down")
            seat.left = True

    def _greet(self, line: socket.socket, hello: dict[str, Any] | None) -> _Seat | None:
        lock = threading.Lock()
        if not hello or hello.get("t") not in ("hello", "who") or hello.get("greeting") != GREETING:
            return None
        if hello["t"] == "who":
            send(line, lock, {"t": "i", "secret": self.secret})
            return None
        seat = _Seat(hello["process"], hello["host"], hello["pid"], line, time.monotonic(), lock=lock)
        problem = self._seat(seat, hello)
        if problem is None:
            return seat
        ending, everyone = problem
        send(line, lock, {"t": "end", **dataclasses.asdict(ending)})
        if everyone:
            self.end(ending)
        return None

    def _seat(self, seat: _Seat, hello: dict[str, Any]) -> tuple[Ending, bool] | None:
        """Seats a newcomer, or says why not and whether that ends the job for all."""
        count, here = self.place.processes, f"{seat.host} (pid {seat.pid})"
        with self.lock:
            if hello["job"] != self.place.job:
                what = f"a process of job '{hello['job']}' on {here} came to the coordinator of job '{self.place.job}'"
                return Ending("start", what, fix=f"give each job its own {COORDINATOR}", code=2), False
            taken = self.seats.get(seat.process)
            if self.started:
                what = f"the job has already begun; process {seat.process} on {here} comes too late or twice"
                return Ending("start", what, fix="end the job that runs, or give this one another port", code=2), False
            if hello["processes"] != count:
                what = (
                    f"process {seat.process} on {here} was told of {hello['processes']} processes, process 0 of {count}"
                )
                fix = "launch every process with the same number (MESHTUNE_PROCESSES, Slurm's --ntasks)"
                return Ending("start", what, fix=fix, code=2), True
            if taken is not None:
                what = f"two processes say that they are number {seat.process}: on {taken.host} (pid {taken.pid}) and "
                fix = "give every process its own number (MESHTUNE_PROCESS), from 0 on"
                return Ending("start", what + f"on {here}", fix=fix, code=2), True
            self.seats[seat.process] = seat
        return None

    def _put(self, process: int, tag: str, value: Any) -> None:
        with self.lock:
            held = self.values.setdefault(tag, {})
            held[process] = value
            if len(held) < self.place.processes:
                return
            del self.values[tag]
            self.started = True
            seats = list(self.seats.values())
        values = [held[number] for number in range(self.place.processes)]
        for seat in seats:
            send(seat.line, seat.lock, {"t": "got", "tag": tag, "value": values})

    def _lost(self, seat: _Seat, why: str) -> None:
        if not seat.left:
            self.end(lost(seat.process, self.place.processes, seat.host, why))

    def _beat(self) -> None:
        while not self.over:
            time.sleep(BEAT)
            for seat in list(self.seats.values()):
                if seat.left:
                    continue
                send(seat.line, seat.lock, {"t": "beat"})
                if time.monotonic() - seat.heard > SILENCE:
                    self._lost(
                        seat, f"no sign of life for {SILENCE:.0f} s: it or its host hangs, or the network is cut"
                    )


def other_hub(place: Place, secret: str, timeout: float = 3.0) -> str | None:
    """The address of a second process 0, if the coordinator's address leads to one that is not this."""
    try:
        with socket.create_connection(place.address, timeout=timeout) as line:
            line.settimeout(timeout)
            send(line, threading.Lock(), {"t": "who", "greeting": GREETING})
            answer = next(messages(line), None)
    except OSError:
        return None  # its own name may lead nowhere from here, as in a pod that is not ready yet
    return None if not answer or answer.get("secret") == secret else place.coordinator


def _family() -> socket.AddressFamily:
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
