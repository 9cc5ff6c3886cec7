"""The coordinator, on process 0: accepts connections, reduces values of all processes, and broadcasts the reason a job
ends."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from meshtune.errors import UserError
from meshtune.mesh.client import (
    HEARTBEAT_INTERVAL,
    HELLO_TIMEOUT,
    MAX_HELLO_BYTES,
    PROTOCOL_VERSION,
    SILENCE_TIMEOUT,
    JobEnd,
    Message,
    configure_socket,
    encode,
    process_lost,
    proof,
    receive_messages,
    send,
)
from meshtune.mesh.reductions import REDUCTIONS
from meshtune.mesh.rendezvous import COORDINATOR, SECRET, ProcessInfo

MAX_STRANGERS = 256  # connections without a proof yet, or twice the processes; of more the oldest is closed
BACKLOG = 4096  # connections that wait to be accepted


@dataclasses.dataclass
class _Connection:
    """An accepted client. `last_message` is the monotonic time of its latest message, `steps` what that said of the
    steps of its loop."""

    process_index: int
    host: str
    pid: int
    socket: socket.socket
    last_message: float
    closed: bool = False
    steps: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Coordinator:
    """Listens at `info.address` and serves every process of the job from background threads.

    A connection has HELLO_TIMEOUT to prove that it is a process of this job; whatever else it sends, it is closed and
    nothing happens to the job. Raises: UserError if the port is in use.
    """

    def __init__(self, info: ProcessInfo):
        self.info, self.identity = info, secrets.token_hex(8)
        host, port = info.address
        try:
            self.server = _listen(host, port)
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen on port {port}: {error.strerror}",
                where=f"host {socket.gethostname()}, coordinator {host}:{port}",
                fix="another process 0 of this job, or another program, is using it: stop that program, or set "
                f"{COORDINATOR} to another port for every process",
            ) from None
        self.lock = threading.Lock()
        self.strangers: collections.deque[socket.socket] = collections.deque()
        self.connections: dict[int, _Connection] = {}
        self.values: dict[str, dict[int, object]] = {}
        self.started = self.ended = False
        threading.Thread(target=self._accept, name="meshtune-coordinator", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="meshtune-coordinator-heartbeat", daemon=True).start()

    @property
    def bound_host(self) -> str | None:
        """The address that it listens at; None for all of this machine."""
        host = self.server.getsockname()[0]
        return None if host in ("::", "0.0.0.0") else host

    @property
    def address(self) -> tuple[str, int]:
        """Where process 0 reaches it."""
        return self.bound_host or "localhost", self.server.getsockname()[1]

    def missing(self) -> list[int]:
        """Indices of the processes that have not connected yet."""
        with self.lock:
            return [index for index in range(self.info.process_count) if index not in self.connections]

    def least_steps(self) -> tuple[int, str, bool]:
        """(index, host, whether others took more steps) of the process that took the fewest steps of its loop."""
        with self.lock:
            connections = sorted(self.connections.values(), key=lambda each: (each.steps, each.process_index))
        return connections[0].process_index, connections[0].host, connections[-1].steps > connections[0].steps

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
        limit = max(MAX_STRANGERS, 2 * self.info.process_count)
        while True:
            try:
                accepted, _ = self.server.accept()
            except OSError:
                if self.ended or self.server.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files, or a connection that is gone already
                continue
            with self.lock:
                self.strangers.append(accepted)
                oldest = self.strangers.popleft() if len(self.strangers) > limit else None
            if oldest is not None:
                _shut(oldest)
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.closing(accepted):
            try:
                accepted.settimeout(HELLO_TIMEOUT)
                configure_socket(accepted)
                connection = self._handshake(accepted, messages := receive_messages(accepted, MAX_HELLO_BYTES))
            except OSError:  # it was closed meanwhile
                connection = None
            finally:
                with self.lock:
                    if accepted in self.strangers:
                        self.strangers.remove(accepted)
            if connection is None:
                return
            accepted.settimeout(SILENCE_TIMEOUT)
            for message in messages:
                connection.last_message = time.monotonic()
                if message["type"] == "put":
                    self._put(connection.process_index, message)
                elif message["type"] == "heartbeat":
                    connection.steps = message["steps"]
                elif message["type"] == "failed":
                    self.end(JobEnd(**message["job_end"]))
                elif message["type"] == "goodbye":
                    break
            else:
                self._lose(connection, "its connection closed: it was killed, crashed, or its host went down")
            connection.closed = True

    def _handshake(self, accepted: socket.socket, messages: Iterator[Message]) -> _Connection | None:
        """Challenges a connection and answers its hello; None if it is not a process of this job."""
        lock, nonce = threading.Lock(), secrets.token_hex(16)
        challenge = {"type": "challenge", "version": PROTOCOL_VERSION, "nonce": nonce, "identity": self.identity}
        started = time.monotonic()
        if not send(accepted, lock, challenge):
            return None
        hello = next(messages, None)
        if not hello or time.monotonic() - started > HELLO_TIMEOUT or not _is_hello(hello):
            return None
        claimed = hello.pop("proof")
        if not hmac.compare_digest(claimed, proof(self.info.secret, "client", nonce, hello)):
            message = f"process {hello['process_index']} on {hello['host']} does not know the secret of this job"
            fix = f"give every process the same {SECRET}, which launchers of Meshtune make by themselves"
            send(accepted, lock, _end_message(JobEnd("start", message, fix=fix, exit_code=2)))
            return None
        send(accepted, lock, {"type": "welcome", "proof": proof(self.info.secret, "coordinator", hello["nonce"], {})})
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
            if not 0 <= client.process_index < count:
                message = f"process {client.process_index} on {sender} is none of the {count} processes of this job"
                return JobEnd("start", message, fix="count processes from 0", exit_code=2), False
            self.connections[client.process_index] = client
        return None

    def _put(self, process_index: int, message: Message) -> None:
        """Stores a process's value for its tag; the last one to arrive sends its result to every process."""
        tag = message["tag"]
        with self.lock:
            by_process = self.values.setdefault(tag, {})
            by_process[process_index] = message["value"]
            if len(by_process) < self.info.process_count:
                return
            del self.values[tag]
            self.started = True
            connections = list(self.connections.values())
        results = REDUCTIONS[message["reduction"]]([by_process[index] for index in range(self.info.process_count)])
        encoded: dict[int, bytes] = {}  # by the identity of a result, which most share
        for connection in connections:
            result = results[connection.process_index]
            if id(result) not in encoded:
                encoded[id(result)] = encode({"type": "result", "tag": tag, "result": result})
            send(connection.socket, connection.lock, encoded[id(result)])

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


def _is_hello(message: Message) -> bool:
    """Whether a message has the fields of a hello, each of its type."""
    types = {
        "process_index": int,
        "process_count": int,
        "pid": int,
        "job": str,
        "host": str,
        "nonce": str,
        "proof": str,
    }
    return (
        message["type"] == "hello"
        and message.get("version") == PROTOCOL_VERSION
        and all(type(message.get(name)) is kind for name, kind in types.items())
    )


def find_second_coordinator(info: ProcessInfo, identity: str, timeout: float = 3.0) -> str | None:
    """The coordinator's address, if another process 0 answers there: one whose identity differs from `identity`."""
    try:
        with socket.create_connection(info.address, timeout=timeout) as connection:
            challenge = next(receive_messages(connection, MAX_HELLO_BYTES), None)
    except OSError:
        return None  # a process may be unable to reach its own name, as in a pod that is not ready yet
    if not challenge or challenge["type"] != "challenge" or challenge.get("identity") == identity:
        return None
    return info.coordinator


def _shut(connection: socket.socket) -> None:
    """Ends a connection that another thread waits for."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int) -> socket.socket:
    """A server at the address of `host`, which other networks of this machine do not reach. At all addresses where the
    name leads elsewhere from here: /etc/hosts gives many machines a loopback address for their own name, and a service
    may be in front. Raises: OSError.
    """
    for family, address in addresses(host):
        try:
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), dualstack_ipv6=dual, family=family, backlog=BACKLOG)


def addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """(family, address) of a host's name, but for loopback addresses of a name that other hosts know too."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    local = host == "localhost" or _is_loopback(host)
    return [(family, str(sock[0])) for family, _, _, _, sock in entries if local or not _is_loopback(str(sock[0]))]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
