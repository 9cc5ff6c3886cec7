"""Saves by the clock: when they become due, and that their times do not change what is learned."""

from __future__ import annotations

import pathlib
import sys
import threading
import time

import pytest

from meshtune.config.load import load_recipe
from meshtune.costs.goodput import best_interval
from meshtune.errors import UserError
from meshtune.train.checkpoint.checkpoints import Checkpoints
from meshtune.train.checkpoint.save_timer import FIRST, SaveTimer
from meshtune.train.evaluation.evaluate import Cadence, Evaluation, at_interval, never
from meshtune.train.loop import Interrupt, run_loop
from meshtune.train.report.events import Events, Note

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_loop import Recorder, begin, run, task


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("meshtune.train.checkpoint.save_timer.time", clock)
    return clock


def written() -> bool:
    return False


def test_a_save_becomes_due_once_for_each_interval(clock: Clock):
    timer = SaveTimer(600.0)
    clock.now += 599
    assert not timer.request(written)
    clock.now += 1
    assert timer.request(written)
    assert not timer.request(written), "it is due already"
    clock.now += 2
    timer.note_save(0.5)
    clock.now += 599
    assert not timer.request(written)


def test_no_save_becomes_due_while_one_is_written_and_the_next_as_soon_as_it_is_not(clock: Clock):
    timer = SaveTimer(10.0)
    clock.now += 50
    assert not timer.request(lambda: True)
    assert timer.request(written)


def test_the_automatic_interval_follows_from_what_saves_cost(clock: Clock):
    timer = SaveTimer(mtbf=12 * 3600.0)
    assert timer.seconds == FIRST
    timer.note_save(30.0)  # compiles, or makes directories
    for cost in (20.0, 20.0):
        timer.note_save(cost)
    assert timer.seconds == best_interval(20.0, 12 * 3600.0)
    assert SaveTimer(mtbf=45.0).seconds == best_interval(1.0, 45.0)
    assert SaveTimer().seconds is None


class OnRequest(SaveTimer):
    """Asks for saves after the updates `due`, whatever the clock says."""

    def __init__(self, due: list[int]):
        super().__init__()
        self.due, self.asked = due, 0

    def request(self, writing) -> bool:
        self.asked += 1
        return self.asked in self.due


def test_saves_by_the_clock_come_at_the_update_after_the_request_and_change_no_number(tmp_path):
    cadence = Cadence(8, never, never, at_interval(None, 8))
    ended, events, saved = run(tmp_path / "timed", task(total=8, cadence=cadence, save_timer=OnRequest([2, 5])))
    assert saved == [3, 6, 8], "process 0 asks while an update runs, and all learn it with that update's metrics"
    plain, plain_events, _ = run(tmp_path / "plain", task(total=8, cadence=cadence))
    assert ended.state.trainable == plain.state.trainable
    losses = [[event.loss for event in of if hasattr(event, "loss")] for of in (events, plain_events)]
    assert losses[0] == losses[1]


class SlowStore(Checkpoints):
    """Is still writing its first save when asked for the first three times afterwards."""

    questions = 0

    @property
    def writing(self) -> bool:
        self.questions += self._newest is not None
        return 0 < self.questions <= 3

    def wait_written(self, seconds: float) -> bool:
        return not self.writing


def slow_run(tmp_path, work):
    events = Recorder()
    with SlowStore(tmp_path, keep=99) as checkpoints:
        ended = run_loop(work, begin(), checkpoints, Events([events]), Interrupt())
    return ended, [event.text for event in events.events if isinstance(event, Note)], checkpoints.steps()


def test_updates_go_on_while_a_save_is_written_and_the_next_save_comes_after_it(tmp_path):
    cadence = Cadence(9, never, never, at_interval(2, 9))
    ended, notes, saved = slow_run(tmp_path / "slow", task(total=9, cadence=cadence))
    assert notes == ["the save of update 4 waits until that of update 2 is written"]
    assert saved == [2, 8, 9], "written when asked for 7, which all processes learn with its metrics, after update 8"
    plain, _, _ = run(tmp_path / "plain", task(total=9, cadence=cadence))
    assert ended.state.trainable == plain.state.trainable


def test_the_best_state_and_the_last_are_saved_at_their_updates_while_one_is_written(tmp_path):
    losses = iter([3.0, 2.0])
    every_update = Cadence(4, at_interval(2, 4), never, at_interval(1, 4))
    work = task(total=4, cadence=every_update, evaluate=lambda _: Evaluation(next(losses), {}, 1.0))
    _, notes, saved = slow_run(tmp_path, work)
    assert notes == ["the save of update 3 waits until that of update 2 is written"]
    assert saved == [1, 2, 4], "2 is the best so far, 4 the last"


def test_a_save_waits_for_one_that_is_written_soon(tmp_path):
    with Checkpoints(tmp_path, keep=99) as checkpoints:
        assert checkpoints.wait_written(0.0)
        checkpoints._newest = 5
        started = time.monotonic()
        assert not checkpoints.wait_written(0.1)
        assert time.monotonic() - started >= 0.1
        threading.Timer(0.05, checkpoints.path(5).mkdir).start()
        assert checkpoints.wait_written(60.0)


RECIPE = "model: {path: x}\ndata: {train: [{path: y}]}\noutput: out\ncheckpoint: {%s}\n"


def load(tmp_path: pathlib.Path, checkpoint: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE % checkpoint)
    return load_recipe(path).checkpoint


@pytest.mark.parametrize("every", ["10m", "2h", "1.5h", "auto", "20"])
def test_saves_are_every_so_many_updates_or_minutes_or_automatic(tmp_path, every: str):
    assert str(load(tmp_path, f"every: {every}").every) == every


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("every: 0m", r"'0m' is not a time above 0 with a unit, such as 90s, 10m, 1\.5h or 2d"),
        ("every: soon", "nor a number of updates, nor auto"),
        ("every: auto, mtbf: 0", "'0' is not a time above 0"),
        ("every: auto, mtbf: 0h", "'0h' is not a time above 0"),
        ("every: 10m, mtbf: 12h", r"checkpoint\.mtbf is for checkpoint\.every: auto"),
    ],
)
def test_times_that_are_none_are_errors(tmp_path, checkpoint: str, message: str):
    with pytest.raises(UserError, match=message):
        load(tmp_path, checkpoint)
