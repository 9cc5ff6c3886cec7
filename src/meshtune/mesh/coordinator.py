"""The coordinator, on process 0: accepts connections, exchanges values between processes, and broadcasts the reason a
job ends."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import threading
import time

from meshtune.errors import UserError
from meshtune.mesh.protocol import (
    HEARTBEAT_INTERVAL,
    PROTOCOL_VERSION,
    SILENCE_TIMEOUT,
    JobEnd,
    Message,
    configure_socket,
    process_lost,
    receive_messages,
    send,
)
from meshtune.mesh.rendezvous import COORDINATOR, ProcessInfo


@dataclasses.dataclass
class _Connection:
    """An accepted client. `last_message` is the monotonic time of its latest message."""

    process_index: int
    host: str
    pid: int
    socket: socket.socket
    last_message: float
    closed: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Coordinator:
    """Listens at `info.address` and serves every process of the job from background threads.

    Raises: UserError if the port is in use.
    """

    def __init__(self, info: ProcessInfo):
        self.info, self.secret = info, secrets.token_hex(8)
        host, port = info.address
        try:
            self.server = socket.create_server(("", port), dualstack_ipv6=socket.has_dualstack_ipv6(), family=_family())
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen on port {port}: {error.strerror}",
                where=f"host {socket.gethostname()}, coordinator {host}:{port}",
                fix="another process 0 of this job, or another program, is using it: stop that program, or set "
                f"{COORDINATOR} to another port for every process",
            ) from None
        self.lock = threading.Lock()
        self.connections: dict[int, _Connection] = {}
        self.values: dict[str, dict[int, object]] = {}
        self.started = self.ended = False
        threading.Thread(target=self._accept, name="meshtune-coordinator", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="meshtune-coordinator-heartbeat", daemon=True).start()

    def missing(self) -> list[int]:
        """Indices of the processes that have not connected yet."""
        with self.lock:
            return [index for index in range(self.info.process_count) if index not in self.connections]

    def end(self, job_end: JobEnd) -> None:
        """Broadcasts the reason the job ends; calls after the first have no effect."""
        with self.lock:
            if self.ended:
                return
            self.ended = True
            connections = list(self.connections.values())
        for connection in connections:
            send(connection.socket, connection.lock, _end_message(job_end))

    def close(self, timeout: float = 5.0) -> None:
        """Waits until every client has disconnected, for at most `timeout` seconds, then stops listening."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not all(client.closed for client in list(self.connections.values())):
            time.sleep(0.02)
        self.ended = True
        self.server.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.closing(accepted):
            accepted.settimeout(SILENCE_TIMEOUT)
            configure_socket(accepted)
            messages = receive_messages(accepted)
            connection = self._handshake(accepted, next(messages, None))
            if connection is None:
                return
            for message in messages:
                connection.last_message = time.monotonic()
                if message["type"] == "put":
                    self._put(connection.process_index, message["tag"], message["value"])
                elif message["type"] == "failed":
                    self.end(JobEnd(**message["job_end"]))
                elif message["type"] == "goodbye":
                    break
            else:
                self._lose(connection, "its connection closed: it was killed, crashed, or its host went down")
            connection.closed = True

    def _handshake(self, accepted: socket.socket, hello: Message | None) -> _Connection | None:
        """Answers the first message of a connection; None if the connection is not a client of this job."""
        lock = threading.Lock()
        if not hello or hello["type"] not in ("hello", "identify") or hello.get("version") != PROTOCOL_VERSION:
            return None
        if hello["type"] == "identify":
            send(accepted, lock, {"type": "identity", "secret": self.secret})
            return None
        connection = _Connection(
            hello["process_index"], hello["host"], hello["pid"], accepted, time.monotonic(), lock=lock
        )
        rejection = self._register(connection, hello)
        if rejection is None:
            return connection
        job_end, ends_job = rejection
        send(accepted, lock, _end_message(job_end))
        if ends_job:
            self.end(job_end)
        return None

    def _register(self, client: _Connection, hello: Message) -> tuple[JobEnd, bool] | None:
        """Registers a new client, or returns why it is rejected and whether that ends the job for all processes."""
        count, sender = self.info.process_count, f"{client.host} (pid {client.pid})"
        with self.lock:
            if hello["job"] != self.info.job:
                message = (
                    f"a process of job '{hello['job']}' on {sender} connected to the coordinator of job "
                    f"'{self.info.job}'"
                )
                return JobEnd("start", message, fix=f"give each job its own {COORDINATOR}", exit_code=2), False
            existing = self.connections.get(client.process_index)
            if self.started:
                message = (
                    f"the job has already started; process {client.process_index} on {sender} connected too late or "
                    "for the second time"
                )
                fix = "stop the running job, or give this one another port"
                return JobEnd("start", message, fix=fix, exit_code=2), False
            if hello["process_count"] != count:
                message = (
                    f"process {client.process_index} on {sender} was launched as one of {hello['process_count']} "
                    f"processes, process 0 as one of {count}"
                )
                fix = "launch every process with the same number of processes (MESHTUNE_PROCESSES, Slurm's --ntasks)"
                return JobEnd("start", message, fix=fix, exit_code=2), True
            if existing is not None:
                message = (
                    f"two processes have the index {client.process_index}: one on {existing.host} (pid {existing.pid}) "
                    f"and one on {sender}"
                )
                fix = "give every process its own index (MESHTUNE_PROCESS), counted from 0"
                return JobEnd("start", message, fix=fix, exit_code=2), True
            self.connections[client.process_index] = client
        return None

    def _put(self, process_index: int, tag: str, value: object) -> None:
        """Stores a process's value for `tag`; the last one to arrive sends all of them to every process."""
        with self.lock:
            by_process = self.values.setdefault(tag, {})
            by_process[process_index] = value
            if len(by_process) < self.info.process_count:
                return
            del self.values[tag]
            self.started = True
            connections = list(self.connections.values())
        values = [by_process[index] for index in range(self.info.process_count)]
        for connection in connections:
            send(connection.socket, connection.lock, {"type": "values", "tag": tag, "values": values})

    def _lose(self, connection: _Connection, reason: str) -> None:
        if not connection.closed:
            self.end(process_lost(connection.process_index, self.info.process_count, connection.host, reason))

    def _send_heartbeats(self) -> None:
        while not self.ended:
            time.sleep(HEARTBEAT_INTERVAL)
            for connection in list(self.connections.values()):
                if connection.closed:
                    continue
                send(connection.socket, connection.lock, {"type": "heartbeat"})
                if time.monotonic() - connection.last_message > SILENCE_TIMEOUT:
                    self._lose(
                        connection,
                        f"no sign of life for {SILENCE_TIMEOUT:.0f} s: it or its host hangs, or the network is down",
                    )


def _end_message(job_end: JobEnd) -> Message:
    return {"type": "end", "job_end": dataclasses.asdict(job_end)}


def find_second_coordinator(info: ProcessInfo, secret: str, timeout: float = 3.0) -> str | None:
    """The coordinator's address, if another process 0 answers there: one whose secret differs from `secret`."""
    try:
        with socket.create_connection(info.address, timeout=timeout) as connection:
            connection.settimeout(timeout)
            send(connection, threading.Lock(), {"type": "identify", "version": PROTOCOL_VERSION})
            answer = next(receive_messages(connection), None)
    except OSError:
        return None  # a process may be unable to reach its own name, as in a pod that is not ready yet
    return None if not answer or answer.get("secret") == secret else info.coordinator


def _family() -> socket.AddressFamily:
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
