"""Times reductions of a coordinator with many clients, which a second process simulates: one socket for each.

python benchmarks/exchanges/run.py > benchmarks/exchanges/result.json
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import platform
import secrets
import selectors
import socket
import statistics
import time

import jax

from meshtune.mesh import coordinator
from meshtune.mesh.client import configure_socket, encode, join
from meshtune.mesh.coordinator import Coordinator
from meshtune.mesh.rendezvous import ProcessInfo

COUNTS = (64, 256, 512, 1024)
ROUNDS = 5
VALUE = "v" * 2000
CASES = {  # the reduction, and the value of each process
    "first: value of process 0": ("first", lambda index: VALUE if index == 0 else None),
    "first: a barrier": ("first", lambda index: None),
    "difference of equal values": ("difference", lambda index: VALUE),
    "maximum of 20 numbers": ("maximum", lambda index: [0.1 * index + number for number in range(20)]),
    "gather on process 0": ("gather", lambda index: VALUE),
}


def simulate_clients(port: int, secret: str, count: int, pipe: multiprocessing.connection.Connection) -> None:
    """Connects `count` clients; then, for each case in the pipe, sends their values and reads all results."""
    info = ProcessInfo(0, count, f"127.0.0.1:{port}", "benchmark", secret=secret)
    started = time.perf_counter()
    sockets = [join(dataclasses.replace(info, process_index=n), info.address, 60)[0] for n in range(count)]
    pipe.send(time.perf_counter() - started)
    selector = selectors.DefaultSelector()
    for connection in sockets:
        configure_socket(connection)
        selector.register(connection, selectors.EVENT_READ)
    while (message := pipe.recv()) is not None:
        case, tag = message
        reduction, value = CASES[case]
        lines = [encode({"type": "put", "reduction": reduction, "tag": tag, "value": value(n)}) for n in range(count)]
        waiting, received = set(sockets), 0
        started = time.perf_counter()
        for connection, line in zip(sockets, lines, strict=True):
            connection.sendall(line)
        while waiting:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 22)
                received += len(data)
                if data.endswith(b"\n"):
                    waiting.discard(key.fileobj)
        pipe.send((time.perf_counter() - started, received))


def main() -> None:
    coordinator.HEARTBEAT_INTERVAL = 1e6  # only reductions are measured
    results = []
    for count in COUNTS:
        secret = secrets.token_hex(16)
        info = ProcessInfo(0, count, "127.0.0.1:0", "benchmark", secret=secret)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = Coordinator(dataclasses.replace(info, coordinator=f"127.0.0.1:{port}"))
        here, there = multiprocessing.Pipe()
        clients = multiprocessing.Process(target=simulate_clients, args=(port, secret, count, there))
        clients.start()
        connecting = here.recv()
        for case in CASES:
            seconds, sent = [], 0
            for number in range(ROUNDS):
                here.send((case, f"{case} {number}"))
                took, sent = here.recv()
                seconds.append(took)
            results.append(
                {
                    "clients": count,
                    "case": case,
                    "median_seconds": round(statistics.median(seconds), 4),
                    "highest_seconds": round(max(seconds), 4),
                    "bytes_sent_by_process_0": sent,
                    "seconds_to_connect": round(connecting, 3),
                }
            )
        here.send(None)
        clients.join()
        server.close(1)
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    print(
        json.dumps(
            {"machine": machine, "command": f"python {pathlib.Path(__file__).name}", "results": results}, indent=1
        )
    )


if __name__ == "__main__":
    main()
