"""Processes that join a job, and the errors of those that cannot."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from job import Processes, free_port

from compiling import FASTER
from meshtune.errors import UserError
from meshtune.mesh.agreement import first_of_each_host, source_digest
from meshtune.mesh.client import PROTOCOL_VERSION, Client, Message, send
from meshtune.mesh.coordinator import Coordinator, addresses, find_second_coordinator
from meshtune.mesh.processes import Job, start
from meshtune.mesh.reductions import REDUCTIONS
from meshtune.mesh.rendezvous import ProcessInfo


def info_of(port: int, index: int = 0, count: int = 2, job: str = "", secret: str = "") -> ProcessInfo:
    return ProcessInfo(index, count, f"localhost:{port}", "test", job=job, secret=secret)


def connect(info: ProcessInfo, timeout: float = 5) -> Client:
    return Client(info, info.address, timeout)


def test_two_processes_see_the_devices_of_both(tmp_path: pathlib.Path):
    flags = {"XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=2"}
    environments = [{"MESHTUNE_PROCESS": str(index), **flags} for index in range(2)]
    for process in Processes(tmp_path, "short", environments=environments).exits():
        assert process.code == 0, process.errors
        assert process.value("devices") == 4
        assert process.value("local") == 2
        assert process.value("value") == 4 * 4 * 64  # four rows of 64 ones: each product of two rows is 64


def test_recipes_that_differ_are_an_error_on_both_processes_and_the_field_is_named(tmp_path: pathlib.Path):
    for process in Processes(tmp_path, "differ").exits():
        assert process.code == 2
        assert "the processes differ in the recipe: train.batch_size is 16 on process 0" in process.errors
        assert "and 17 on process 1" in process.errors


def test_a_single_process_starts_no_coordinator():
    job = start(ProcessInfo())
    assert (job.process_index, job.process_count, job.is_main_process) == (0, 1, True)
    assert job.coordinator is None
    with job:
        assert job.gather("anything", 5) == [5]
        assert job.broadcast("anything", 5) == 5
        assert job.rank("anything", "a") == (0, 1, True)


VALUES: dict[str, list[object]] = {
    "first": [None, "b", "c"],
    "gather": [10, 11, 12],
    "maximum": [[1, 5], [2, -7], [0, 6]],
    "difference": ["x", "x", "y"],
    "merge": [{"a": 1}, {}, {"b": 2}],
    "rank": ["host 2", "host 1", "host 2"],
}
RESULTS: dict[str, list[object]] = {
    "first": [[1, "b"]] * 3,
    "gather": [[10, 11, 12], None, None],
    "maximum": [[2, 6]] * 3,
    "difference": [[2, 2]] * 3,
    "merge": [{"a": 1, "b": 2}] * 3,
    "rank": [[0, 2, True], [1, 2, True], [0, 2, False]],
}


def reduce_together(clients: list[Client], reduction: str, values: list[object]) -> list[object]:
    """The result of every client, which call in the reverse order."""
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        calls = [
            pool.submit(client.reduce, reduction, "x", value, 5)
            for client, value in reversed(list(zip(clients, values, strict=True)))
        ]
        return [call.result() for call in reversed(calls)]


def test_values_are_reduced_for_every_process():
    port = free_port()
    Coordinator(info_of(port, count=3))
    clients = [connect(info_of(port, index, 3)) for index in range(3)]
    assert VALUES.keys() == REDUCTIONS.keys()
    assert {name: reduce_together(clients, name, values) for name, values in VALUES.items()} == RESULTS
    assert reduce_together(clients, "first", [None] * 3) == [None] * 3
    assert reduce_together(clients, "difference", [{"a": [1]}] * 3) == [None] * 3


def test_a_reduction_sends_a_value_to_every_process_and_never_all_values(monkeypatch: pytest.MonkeyPatch):
    """The bytes that the coordinator sends grow with the number of processes, not with its square."""
    sent: list[int] = []

    def count(connection: socket.socket, lock: threading.Lock, message: Message | bytes) -> bool:
        if isinstance(message, bytes):
            sent.append(len(message))
        return send(connection, lock, message)

    monkeypatch.setattr("meshtune.mesh.coordinator.send", count)
    totals: dict[str, list[int]] = {"first": [], "difference": [], "gather": []}
    for processes in (4, 8):
        port = free_port()
        Coordinator(info_of(port, count=processes))
        clients = [connect(info_of(port, index, processes)) for index in range(processes)]
        for reduction, measured in totals.items():
            sent.clear()
            reduce_together(clients, reduction, ["v" * 2000] * processes)
            measured.append(sum(sent))
    assert all(eight < 2.01 * four for four, eight in totals.values())
    assert totals["first"][1] < 8 * 2200
    assert totals["difference"][1] < 8 * 200


def test_a_coordinator_that_cannot_be_reached_is_an_error_that_says_what_to_check():
    port = free_port()
    with pytest.raises(
        UserError, match=f"process 1 of 2 could not reach the coordinator at localhost:{port} in 1 s"
    ) as e:
        start(info_of(port, 1), timeout=1)
    assert "refused" in e.value.what
    assert e.value.fix is not None
    assert "firewall" in e.value.fix


def test_a_coordinator_whose_host_name_is_unknown_is_named():
    with pytest.raises(UserError, match=r"at nowhere\.invalid:5000 in 1 s: "):
        start(ProcessInfo(1, 2, "nowhere.invalid:5000", "test"), timeout=1)


def test_processes_that_do_not_connect_are_named_by_process_0():
    with pytest.raises(UserError, match="processes 1, 2 of 3 did not connect to localhost:"):
        start(info_of(free_port(), 0, 3), timeout=1)


def test_processes_that_have_connected_are_told_which_are_missing():
    port = free_port()
    messages: list[str] = []

    def second():
        with pytest.raises(UserError) as error:
            start(info_of(port, 1, 3), timeout=5)
        messages.append(error.value.what)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(UserError, match="process 2 of 3 did not connect"):
        start(info_of(port, 0, 3), timeout=2)
    thread.join(10)
    assert messages
    assert "process 2 of 3 did not connect" in messages[0]


def test_two_processes_with_one_index_are_an_error_on_all_processes():
    port = free_port()
    Coordinator(info_of(port, count=3))
    clients = [connect(info_of(port, index, 3)) for index in (0, 1, 1)]
    for client in clients:
        with pytest.raises(UserError, match="two processes have the index 1"):
            client.reduce("gather", "start", None, 5)


def test_a_second_process_0_is_detected_at_the_coordinators_address():
    port = free_port()
    Coordinator(info_of(port))
    assert find_second_coordinator(info_of(port), "another secret") == f"localhost:{port}"
    with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}"):
        Coordinator(info_of(port))


def test_different_process_counts_are_an_error_on_all_processes():
    port = free_port()
    Coordinator(info_of(port, count=2))
    clients = [connect(info_of(port, 0, 2)), connect(info_of(port, 1, 3))]
    for client in clients:
        with pytest.raises(UserError, match="was launched as one of 3 processes, process 0 as one of 2"):
            client.reduce("gather", "start", None, 5)


def test_a_process_of_another_job_is_rejected_and_the_job_continues():
    port = free_port()
    Coordinator(info_of(port, job="7"))
    first = connect(info_of(port, 0, job="7"))
    with pytest.raises(UserError, match="a process of job '8'"):
        connect(info_of(port, 1, job="8")).reduce("gather", "start", None, 5)
    second = connect(info_of(port, 1, job="7"))
    assert reduce_together([first, second], "gather", ["a", "b"]) == [["a", "b"], None]


def test_a_process_that_connects_after_the_start_is_rejected_and_the_job_continues():
    port = free_port()
    Coordinator(info_of(port, count=1))
    client = connect(info_of(port, 0, 1))
    assert client.reduce("gather", "start", 1, 5) == [1]
    with pytest.raises(UserError, match="the job has already started"):
        connect(info_of(port, 0, 1)).reduce("gather", "start", None, 5)
    assert client.reduce("gather", "next", 2, 5) == [2]


def test_a_connection_that_does_not_speak_the_protocol_is_closed():
    port = free_port()
    Coordinator(info_of(port, count=1))
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"challenge" in stranger.recv(1000)
        assert stranger.recv(100) == b""
    assert connect(info_of(port, 0, 1)).reduce("gather", "start", 1, 5) == [1]


def test_a_single_process_raises_its_own_error():
    with pytest.raises(UserError, match="the error itself"), Job(ProcessInfo()):
        raise UserError("the error itself")


def test_the_digest_of_the_source_changes_with_any_file(tmp_path: pathlib.Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_digest(tmp_path) != before


@pytest.mark.parametrize(("hosts", "shares"), [(["a", "a", "b"], [(0, 2), (0, 2), (1, 2)]), (["a"] * 3, [(0, 1)] * 3)])
def test_the_first_process_of_each_host_works_before_the_others(hosts, shares):
    port = free_port()
    Coordinator(info_of(port, count=3))
    order: list[int] = []
    received: dict[int, tuple[int, int]] = {}

    def run(index):
        client = connect(info_of(port, index, count=3))
        client.host = hosts[index]
        with first_of_each_host(Job(client.info, client), "data") as share:
            time.sleep(0.2 if index == 0 else 0)
            order.append(index)
            received[index] = share

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [received[index] for index in range(3)] == shares
    first = {hosts.index(name) for name in hosts}
    assert set(order[: len(first)]) == first


HELLO = {
    "type": "hello", "version": PROTOCOL_VERSION, "process_index": 7, "process_count": 9, "job": "", "host": "stranger",
    "pid": 1, "nonce": "0", "proof": "0" * 64,
}  # fmt: skip
ATTEMPTS = {
    "a hello of other sizes": json.dumps(HELLO).encode() + b"\n",
    "a hello without fields": json.dumps({"type": "hello", "version": PROTOCOL_VERSION}).encode() + b"\n",
    "fields of other types": json.dumps(HELLO | {"process_index": [], "proof": None}).encode() + b"\n",
    "deep": b"[" * 10_000 + b"\n",
    "a line that does not end": b"x" * 100_000,
    "nothing": b"",
    "a failure": b'{"type": "failed", "job_end": {"cause": "lost", "message": "x"}}\n',
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_stranger_never_ends_a_job(attempt: str):
    port = free_port()
    coordinator = Coordinator(info_of(port, secret="s"))
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(ATTEMPTS[attempt])
        clients = [connect(info_of(port, index, secret="s")) for index in range(2)]
        assert reduce_together(clients, "gather", [0, 1]) == [[0, 1], None]
        assert not coordinator.ended
    coordinator.close(0)


def test_connections_that_say_nothing_take_no_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshtune.mesh.coordinator.MAX_STRANGERS", 8)
    port = free_port()
    coordinator = Coordinator(info_of(port, secret="s"))
    silent = [socket.create_connection(("localhost", port)) for _ in range(40)]
    clients = [connect(info_of(port, index, secret="s")) for index in range(2)]
    deadline = time.monotonic() + 10  # a client is counted once its thread has read its answer
    while coordinator.missing() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert coordinator.missing() == []
    assert len(coordinator.strangers) <= 8
    for connection in [*silent, *(client._connection for client in clients)]:
        connection.close()
    coordinator.close(0)


def test_a_process_with_another_secret_is_told_and_the_job_goes_on():
    port = free_port()
    coordinator = Coordinator(info_of(port, secret="right"))
    client = connect(info_of(port, 1, secret="wrong"))
    with pytest.raises(UserError, match=r"process 1 on .* does not know the secret of this job"):
        client.reduce("gather", "x", 0, 5)
    assert not coordinator.ended
    coordinator.close(0)


def test_a_coordinator_that_does_not_know_the_secret_is_refused():
    port = free_port()
    coordinator = Coordinator(info_of(port))
    coordinator._handshake = _welcome_all  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match="no process of this job: it does not know the job's secret"):
        connect(info_of(port, 1, secret="s"))
    coordinator.close(0)


def _welcome_all(accepted: socket.socket, messages: Iterator[dict[str, object]]) -> None:
    send(accepted, threading.Lock(), {"type": "challenge", "version": PROTOCOL_VERSION, "nonce": "1", "identity": "2"})
    next(messages)
    send(accepted, threading.Lock(), {"type": "welcome", "proof": "0" * 64})


def test_a_coordinator_on_this_machine_alone_is_not_reached_from_outside():
    port = free_port()
    coordinator = Coordinator(info_of(port))
    assert coordinator.bound_host in ("127.0.0.1", "::1")
    coordinator.close(0)


def test_a_host_that_knows_itself_by_a_loopback_address_listens_for_the_others(monkeypatch: pytest.MonkeyPatch):
    """As Debian's /etc/hosts has it."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    assert addresses("node7") == []
    assert addresses("localhost") == [(socket.AF_INET, "127.0.1.1")]


def test_real_processes_start_and_end_while_strangers_knock(tmp_path: pathlib.Path):
    port = free_port()
    common = {"MESHTUNE_COORDINATOR": f"localhost:{port}", "MESHTUNE_SECRET": "s"}
    processes = Processes(tmp_path, "short", environments=[{"MESHTUNE_PROCESS": str(n), **common} for n in range(2)])
    stop = threading.Event()

    def knock() -> None:
        for attempt in itertools.cycle(ATTEMPTS.values()):
            if stop.wait(0.05):
                return
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1) as stranger:
                stranger.sendall(attempt)

    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    for process in processes.exits():
        assert process.code == 0, process.errors
    stop.set()
    knocking.join()
