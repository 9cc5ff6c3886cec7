"""Goodput over the attempts of a run, by the lines that they write."""

from __future__ import annotations

import pathlib

import pytest

from meshtune.runs.output import read_run
from meshtune.train.report.attempts import ATTEMPTS, AttemptsLog, goodput_of, read_goodput
from meshtune.train.report.events import Saved, Started, Stepped, Stopped


def start(step: int, started: float) -> dict[str, object]:
    return {"kind": "start", "step": step, "time": started + 10, "started": started}


def save(step: int, useful: float, time: float) -> dict[str, object]:
    return {"kind": "save", "step": step, "useful": useful, "time": time}


def test_only_updates_up_to_the_save_that_the_next_attempt_began_from_count():
    rows = [
        start(0, 1000),
        save(10, 20.0, 1030),
        save(20, 40.0, 1050),
    ]  # killed later, the save of update 20 incomplete
    assert goodput_of(rows).useful_seconds == 40.0
    rows += [start(10, 1100), save(20, 25.0, 1135), {"kind": "stop", "step": 25, "useful": 35.0, "time": 1150}]
    goodput = goodput_of(rows)
    assert goodput.useful_seconds == 20 + 35
    assert goodput.wall_seconds == 150
    assert goodput.share == pytest.approx(55 / 150)
    assert goodput.attempts == 2
    assert goodput_of([]).share == 0.0


@pytest.mark.parametrize("behind", [0.0, 3600.0])
def test_a_host_whose_clock_is_behind_does_not_shorten_the_attempts(behind: float):
    """The second attempt's process 0 is on another host: only the 45 s between the attempts can be lost."""
    rows = [start(0, 1000), save(10, 20.0, 1030), start(10, 1075 - behind), save(20, 25.0, 1135 - behind)]
    goodput = goodput_of(rows)
    assert goodput.wall_seconds == 30 + (0 if behind else 45) + 60
    assert goodput.useful_seconds == 45


def stepped(step: int, seconds: float) -> Stepped:
    return Stepped(step, 0.0, 1.0, 1.0, 0.1, {}, 1, 1, seconds, 0)


def test_the_log_survives_a_killed_process_and_run_json_has_the_goodput(tmp_path: pathlib.Path):
    log = AttemptsLog(tmp_path, 0.0)
    for event in (Started(0, 9), stepped(1, 2.0), stepped(2, 3.0), Saved(2, tmp_path), stepped(3, 4.0)):
        log.receive(event)
    log.close()
    with (tmp_path / ATTEMPTS).open("a") as file:
        file.write('{"kind": "sa')  # killed while it writes
    log = AttemptsLog(tmp_path, 0.0)
    for event in (Started(2, 9), stepped(3, 5.0), Stopped(3, "")):
        log.receive(event)
    log.close()
    assert read_goodput(tmp_path).useful_seconds == 10.0
    assert read_goodput(tmp_path).attempts == 2
    assert read_run(tmp_path)["goodput"]["useful_seconds"] == 10.0
