"""Processes that find each other, or say why they do not."""

from __future__ import annotations

import pathlib
import sys
import threading

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from job import Processes, free_port

from meshtune.errors import UserError
from meshtune.mesh.agreement import source_digest
from meshtune.mesh.hub import Hub, other_hub
from meshtune.mesh.member import Member
from meshtune.mesh.peers import Place
from meshtune.mesh.processes import Job, start


def at(port: int, process: int = 0, processes: int = 2, job: str = "") -> Place:
    return Place(process, processes, f"localhost:{port}", "test", job=job)


def come(place: Place, timeout: float = 5) -> Member:
    return Member(place, place.address, timeout)


def test_two_processes_see_the_devices_of_both(tmp_path: pathlib.Path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    places = [{"MESHTUNE_PROCESS": str(number), **flags} for number in range(2)]
    for end in Processes(tmp_path, "short", places=places).ends():
        assert end.code == 0, end.errors
        assert end.saying("devices") == 4
        assert end.saying("local") == 2
        assert end.saying("value") == 4 * 4 * 64  # four rows of 64 ones: each product of two rows is 64


def test_recipes_that_differ_are_an_error_on_both_that_names_the_field(tmp_path: pathlib.Path):
    for end in Processes(tmp_path, "differ").ends():
        assert end.code == 2
        assert "the processes differ in the recipe: train.batch_size is 16 on process 0" in end.errors
        assert "and 17 on process 1" in end.errors


def test_a_process_alone_starts_nothing():
    job = start(Place())
    assert (job.process, job.processes, job.first) == (0, 1, True)
    with job:
        assert job.exchange("anything", 5) == [5]


def test_values_are_exchanged_in_order_of_process():
    port = free_port()
    Hub(at(port))
    members = [come(at(port, number)) for number in range(2)]
    got: list[list[int]] = [[], []]
    threads = [threading.Thread(target=lambda n=n: got[n].extend(members[n].exchange("x", 10 + n, 5))) for n in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[10, 11], [10, 11]]


def test_a_coordinator_that_cannot_be_reached_is_named_with_what_to_check():
    port = free_port()
    with pytest.raises(
        UserError, match=f"process 1 of 2 could not reach the coordinator at localhost:{port} in 1 s"
    ) as e:
        start(at(port, 1), timeout=1)
    assert "refused" in e.value.what
    assert e.value.fix is not None
    assert "firewall" in e.value.fix


def test_a_coordinator_whose_name_is_unknown_is_named():
    with pytest.raises(UserError, match=r"at nowhere\.invalid:5000 in 1 s: "):
        start(Place(1, 2, "nowhere.invalid:5000", "test"), timeout=1)


def test_processes_that_do_not_come_are_named_by_process_0():
    with pytest.raises(UserError, match="processes 1, 2 of 3 did not come to localhost:"):
        start(at(free_port(), 0, 3), timeout=1)


def test_those_who_came_hear_who_is_missing():
    port = free_port()
    heard: list[str] = []

    def second():
        with pytest.raises(UserError) as error:
            start(at(port, 1, 3), timeout=5)
        heard.append(error.value.what)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(UserError, match="process 2 of 3 did not come"):
        start(at(port, 0, 3), timeout=2)
    thread.join(10)
    assert heard
    assert "process 2 of 3 did not come" in heard[0]


def test_a_number_taken_twice_is_an_error_for_all():
    port = free_port()
    Hub(at(port, processes=3))
    members = [come(at(port, number, 3)) for number in (0, 1, 1)]
    for member in members:
        with pytest.raises(UserError, match="two processes say that they are number 1"):
            member.exchange("start", None, 5)


def test_a_second_process_0_is_found_by_the_first_ones_address():
    port = free_port()
    Hub(at(port))
    assert other_hub(at(port), "another secret") == f"localhost:{port}"
    with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}"):
        Hub(at(port))


def test_processes_told_of_different_numbers_are_an_error_for_all():
    port = free_port()
    Hub(at(port, processes=2))
    members = [come(at(port, 0, 2)), come(at(port, 1, 3))]
    for member in members:
        with pytest.raises(UserError, match="was told of 3 processes, process 0 of 2"):
            member.exchange("start", None, 5)


def test_a_process_of_another_job_is_turned_away_and_the_job_goes_on():
    port = free_port()
    Hub(at(port, job="7"))
    first = come(at(port, 0, job="7"))
    with pytest.raises(UserError, match="a process of job '8'"):
        come(at(port, 1, job="8")).exchange("start", None, 5)
    second = come(at(port, 1, job="7"))
    threading.Thread(target=lambda: first.exchange("start", "a", 5)).start()
    assert second.exchange("start", "b", 5) == ["a", "b"]


def test_one_that_comes_after_the_start_does_not_disturb_the_job():
    port = free_port()
    Hub(at(port, processes=1))
    member = come(at(port, 0, 1))
    assert member.exchange("start", 1, 5) == [1]
    with pytest.raises(UserError, match="the job has already begun"):
        come(at(port, 0, 1)).exchange("start", None, 5)
    assert member.exchange("more", 2, 5) == [2]


def test_what_is_not_ours_on_the_port_is_ignored():
    import socket

    port = free_port()
    Hub(at(port, processes=1))
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    assert come(at(port, 0, 1)).exchange("start", 1, 5) == [1]


def test_a_failure_tells_the_rest_where_it_was(tmp_path: pathlib.Path):
    job = Job(Place())
    with pytest.raises(UserError), job:
        raise UserError("one process alone raises what it raises")


def test_the_digest_of_the_source_changes_with_any_file(tmp_path: pathlib.Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = source_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert source_digest(tmp_path) != before
