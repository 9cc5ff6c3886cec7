"""One process goes down, and the others say which and why, at once."""

from __future__ import annotations

import pathlib
import signal
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from job import Processes

LIMIT = 20  # seconds; the promise is 60, what is seen is well under one


@pytest.mark.parametrize(("victim", "what"), [(0, "work"), (1, "work"), (1, "idle")])
def test_a_killed_process_ends_the_others_who_name_it(tmp_path: pathlib.Path, victim: int, what: str):
    processes = Processes(tmp_path, what)
    processes.wait_for("value")
    time.sleep(0.2)
    began = time.monotonic()
    processes.running[victim].kill()
    ends = processes.ends(LIMIT)
    assert time.monotonic() - began < LIMIT
    left = ends[1 - victim]
    assert left.code == 75, left.errors
    assert f"error: process {victim} of 2 on " in left.errors
    assert " was lost: " in left.errors
    assert "resume=true" in left.errors


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [("raise", 2, "failed: record 7 is not JSON"), ("crash", 1, "failed: OSError: [Errno 28] No space left on device")],
)
def test_an_error_on_one_process_ends_the_other_with_its_reason(
    tmp_path: pathlib.Path, what: str, code: int, message: str
):
    first, second = Processes(tmp_path, what).ends(LIMIT + 20)
    assert second.code == code
    assert first.code == code
    assert "error: process 1 of 2 on " in first.errors
    assert message in first.errors


@pytest.mark.parametrize("to", [(0,), (1,), (0, 1)])
def test_a_signal_to_any_process_stops_all_after_the_same_update(tmp_path: pathlib.Path, to: tuple[int, ...]):
    processes = Processes(tmp_path, "stop")
    processes.wait_for("pid")
    time.sleep(0.3)
    for number in to:
        processes.running[number].send_signal(signal.SIGTERM)
    first, second = processes.ends(LIMIT)
    assert first.code == second.code == 128 + signal.SIGTERM, first.errors
    assert first.saying("done") == second.saying("done")
    assert first.saying("signal") == second.saying("signal") == signal.SIGTERM
    assert first.saying("skew") == 1.0  # process p says 1 + p seconds


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_falls_silent_is_named_within_a_minute(tmp_path: pathlib.Path, victim: int):
    processes = Processes(tmp_path, "work")
    processes.wait_for("value")
    stopped = processes.running[victim]
    stopped.send_signal(signal.SIGSTOP)  # as a host that is gone: its connections stay open and nothing comes
    began = time.monotonic()
    try:
        code = processes.running[1 - victim].wait(60)
    finally:
        stopped.send_signal(signal.SIGCONT)
        stopped.kill()
    assert time.monotonic() - began < 60
    assert code == 75
    assert f"error: process {victim} of 2 on " in processes.errors(1 - victim)
