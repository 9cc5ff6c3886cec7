"""A process's connection to the coordinator: exchanges small values and receives the reason a job ends."""

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


class Client:
    """One process's connection to the coordinator.

    When the job ends, `on_end` is called in a background thread with the reason. Before `on_end` is set, and while
    `exchange` waits, the reason is raised by `exchange` instead.
    """

    def __init__(self, info: ProcessInfo, address: tuple[str, int], timeout: float):
        self.info, self.host = info, socket.gethostname()
        self.on_end: Callable[[JobEnd], None] | None = None
        self.job_end: JobEnd | None = None
        self.ended = threading.Event()
        self.leaving = False
        self._lock, self._received = threading.Lock(), queue.Queue[Message]()
        self._exchanging = False
        self._connection = connect(info, address, timeout)
        # The process count is sent so that the coordinator can compare it with its own.
        hello = {
            "type": "hello",
            "version": PROTOCOL_VERSION,
            "process_index": info.process_index,
            "process_count": info.process_count,
            "job": info.job,
            "host": self.host,
            "pid": os.getpid(),
        }
        send(self._connection, self._lock, hello)
        threading.Thread(target=self._receive, name="meshtune-client", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="meshtune-heartbeat", daemon=True).start()

    def exchange(self, tag: str, value: object, timeout: float) -> list[Any]:
        """The `value` (JSON) of every process, in order of process, once all have called with the same `tag`.

        Raises: UserError if the job ends meanwhile, or if a process has not called within `timeout` seconds.
        """
        self._exchanging = True
        send(self._connection, self._lock, {"type": "put", "tag": tag, "value": value})
        try:
            while True:
                message = self._received.get(timeout=timeout)
                if message["type"] == "end":
                    assert self.job_end is not None
                    raise self.job_end.to_error()
                if message["tag"] == tag:
                    return message["values"]
        except queue.Empty:
            raise UserError(
                f"not every process reached '{tag}' within {timeout:.0f} s",
                where=f"process {self.info.process_index} of {self.info.process_count} on {self.host}",
                fix="look at the logs of the processes that are late",
            ) from None
        finally:
            self._exchanging = False

    def report_failure(self, job_end: JobEnd) -> None:
        """Ends the job for every process; returns once the coordinator has passed the reason on."""
        self.leaving = True
        message = {"type": "failed", "job_end": dataclasses.asdict(job_end)}
        if self.job_end is None and send(self._connection, self._lock, message):
            self.ended.wait(5.0)
        self.close()

    def close(self) -> None:
        """Leaves the job: whatever happens to it afterwards no longer ends this process."""
        self.leaving = True
        send(self._connection, self._lock, {"type": "goodbye"})

    def _receive(self) -> None:
        self._connection.settimeout(SILENCE_TIMEOUT)
        for message in receive_messages(self._connection):
            if message["type"] == "values":
                self._received.put(message)
            elif message["type"] == "end":
                self._end(JobEnd(**message["job_end"]))
                return
        host, _ = self.info.address
        reason = "its connection closed or fell silent: it was killed, crashed, or its host went down"
        self._end(process_lost(0, self.info.process_count, host, reason))

    def _end(self, job_end: JobEnd) -> None:
        self.job_end = job_end
        self.ended.set()
        self._received.put({"type": "end"})
        if self.on_end is not None and not self.leaving and not self._exchanging:
            self.on_end(job_end)

    def _send_heartbeats(self) -> None:
        while not self.leaving and not self.ended.is_set():
            time.sleep(HEARTBEAT_INTERVAL)
            send(self._connection, self._lock, {"type": "heartbeat"})


def connect(info: ProcessInfo, address: tuple[str, int], timeout: float) -> socket.socket:
    """Connects to the coordinator, retrying for `timeout` seconds. Raises: UserError if it cannot be reached."""
    started, pause, reason = time.monotonic(), 0.1, "no attempt was made"
    while True:
        remaining = timeout - (time.monotonic() - started)
        if remaining <= 0:
            break
        try:
            connection = socket.create_connection(address, timeout=min(10.0, remaining))
            configure_socket(connection)
            return connection
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(max(0.0, min(pause, timeout - (time.monotonic() - started))))
        pause = min(2.0, pause * 1.5)
    host, port = address
    raise UserError(
        f"process {info.process_index} of {info.process_count} could not reach the coordinator at {host}:{port} in "
        f"{timeout:.0f} s: {reason}",
        where=f"host {socket.gethostname()}, launched by {info.launcher}",
        fix=f"check that process 0 was started on {host}, that this host resolves that name (getent hosts {host}) and "
        f"that no firewall closes port {port} between them; {COORDINATOR}=host:port sets another address",
    )
