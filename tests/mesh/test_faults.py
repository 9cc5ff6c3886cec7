"""A process that fails ends all others at once, with a message that names it and the reason."""

from __future__ import annotations

import pathlib
import re
import signal
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from job import Processes

LIMIT = 20  # seconds; 60 are documented, and less than one is usual


@pytest.mark.parametrize(
    ("victim", "activity"),
    [(0, "work"), (1, "idle thread"), *(pytest.param(1, name, marks=pytest.mark.slow) for name in ("idle", "work"))],
)
def test_a_killed_process_ends_the_others_with_a_message_that_names_it(
    tmp_path: pathlib.Path, victim: int, activity: str
):
    processes = Processes(tmp_path, *activity.split())
    processes.wait_for("value")
    time.sleep(0.2)
    started = time.monotonic()
    processes.running[victim].kill()
    exits = processes.exits(LIMIT)
    assert time.monotonic() - started < LIMIT
    survivor = exits[1 - victim]
    assert survivor.code == 75, survivor.errors
    assert f"error: process {victim} of 2 on " in survivor.errors
    assert " was lost: " in survivor.errors
    assert "resume=true" in survivor.errors


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [("raise", 2, "failed: record 7 is not JSON"), ("crash", 1, "failed: OSError: [Errno 28] No space left on device")],
)
def test_an_error_on_one_process_ends_the_other_with_its_reason(
    tmp_path: pathlib.Path, failure: str, code: int, message: str
):
    first, second = Processes(tmp_path, failure).exits(LIMIT + 20)
    assert second.code == code
    assert first.code == code
    assert "error: process 1 of 2 on " in first.errors
    assert message in first.errors


@pytest.mark.slow
def test_processes_that_come_too_far_apart_end_with_75_and_say_so(tmp_path: pathlib.Path):
    """Gloo waits half a minute: process 1 never takes part in the first operation, though it lives."""
    first, second = Processes(tmp_path, "late").exits(90)
    assert first.code == second.code == 75, first.errors
    for errors in (first.errors, second.errors):
        assert "error: process 0 of 2 on " in errors
        assert "waited 30 s for the others" in errors
        assert "Gloo" in errors
        assert "resume=true" in errors
        assert "Traceback" not in errors.partition("error: ")[2]


@pytest.mark.parametrize(
    "signalled", [pytest.param((0,), marks=pytest.mark.slow), (1,), pytest.param((0, 1), marks=pytest.mark.slow)]
)
def test_a_signal_to_any_process_stops_all_after_the_same_update(tmp_path: pathlib.Path, signalled: tuple[int, ...]):
    processes = Processes(tmp_path, "stop")
    processes.wait_for("pid")
    time.sleep(0.3)
    for index in signalled:
        processes.running[index].send_signal(signal.SIGTERM)
    first, second = processes.exits(LIMIT)
    assert first.code == second.code == 128 + signal.SIGTERM, first.errors
    assert first.value("updates") == second.value("updates")
    assert first.value("signal") == second.value("signal") == signal.SIGTERM
    assert first.value("skew") == 1.0  # process p reports 1 + p seconds


def test_a_process_whose_main_thread_sleeps_is_named_and_all_write_their_stacks(tmp_path: pathlib.Path):
    """Its connection and heartbeats live: only the updates stop."""
    first, second = Processes(tmp_path, "stall").exits(60)
    assert first.code == second.code == 75, first.errors
    for process in (first, second):
        assert "error: process 1 of 2 on " in process.errors
        assert " does not go on: no update for " in process.errors
        assert re.search(r"job_process\.py\", line \d+ in stall", process.errors), process.errors
    assert "resume=true" in first.errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_falls_silent_is_named_within_a_minute(tmp_path: pathlib.Path, victim: int):
    processes = Processes(tmp_path, "work")
    processes.wait_for("value")
    stopped = processes.running[victim]
    stopped.send_signal(signal.SIGSTOP)  # like a host that went down: its connections stay open and nothing is sent
    started = time.monotonic()
    try:
        code = processes.running[1 - victim].wait(60)
    finally:
        stopped.send_signal(signal.SIGCONT)
        stopped.kill()
    assert time.monotonic() - started < 60
    assert code == 75
    assert f"error: process {victim} of 2 on " in processes.errors(1 - victim)
