"""The loop on a step of one line: the events that are due, their order, and the ways it stops."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.data.conversation import Origin
from meshtune.errors import UserError
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
from meshtune.train.evaluation.evaluate import Cadence, EarlyStopping, Evaluation, at_interval, evaluations, never
from meshtune.train.loop import Interrupt, LoadedBatches, Task, interruptible, run_loop
from meshtune.train.report.events import Evaluated, Events, Note, Sampled, Saved, Started, Stepped, Stopped
from meshtune.train.step.state import TrainState


@dataclasses.dataclass
class Rows:
    """A batch of 2 micro-batches of 1 row of 3."""

    step: int
    arrays: dict
    origins: list
    metrics: dict = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    rollout_rows: tuple = ()
    counts: None = None


def rows(step: int) -> Rows:
    full = np.full((2, 1, 3), step, np.float32)
    arrays = {"weights": np.float32([[[0, 1, 1]], [[1, 1, 0]]]), "segment_ids": np.int32(full >= 0), "x": full}
    return Rows(step, arrays, [[[Origin("data.jsonl", 2 * step + micro)]] for micro in range(2)])


@jax.jit
def add_one(state: TrainState, frozen, batch, seed):
    """Counts in w; a row whose number is `frozen` is not finite in its second micro-batch."""
    bad = batch["x"][0, 0, 0] == frozen
    finite = jnp.stack([True, ~bad])
    new = TrainState(state.step + 1, {"w": state.trainable["w"] + 1}, ())
    state = jax.tree.map(lambda after, before: jnp.where(bad, before, after), new, state)
    loss = jnp.where(bad, jnp.nan, 10.0 - batch["x"][0, 0, 0])
    return state, {
        "loss": loss, "weight": 4.0, "accuracy": 0.5, "grad_norm": loss * 2, "finite": ~bad, "finite_micro": finite
    }  # fmt: skip


class Recorder:
    def __init__(self):
        self.events = []

    def receive(self, event):
        self.events.append(event)

    def close(self):
        pass


def task(total=6, start=0, bad=-1, **options) -> Task:
    cadence = options.pop("cadence", Cadence(total, never, never, at_interval(2, total)))
    return Task(
        step=add_one,
        frozen=jnp.float32(bad),
        batches=options.pop("batches", None)
        or LoadedBatches(lambda first, last: map(rows, range(first, last)), start, total),
        learning_rate=lambda step: 0.1 * step,
        epoch_at=lambda step: step / 4,
        cadence=cadence,
        record=Record(start, 0, {}, "", "", ""),
        early_stopping=options.pop("early_stopping", EarlyStopping(None, 0.0)),
        keep_best=options.pop("keep_best", True),
        **options,
    )


def begin(step=0) -> TrainState:
    return TrainState(jnp.int32(step), {"w": jnp.float32(step)}, ())


def run(tmp_path, work: Task, state=None, interrupt=None, sink=None):
    recorder = sink or Recorder()
    with Checkpoints(tmp_path, keep=99) as checkpoints:
        start = work.record.step
        ended = run_loop(work, state or begin(start), checkpoints, Events([recorder]), interrupt or Interrupt())
        checkpoints.wait()
        return ended, recorder.events, checkpoints.steps()


def event_names(events) -> list[str]:
    short = {Started: "start", Stepped: "", Evaluated: "eval", Sampled: "sample", Saved: "save", Stopped: "stop"}
    return [f"{short[type(event)]}{getattr(event, 'step', '')}" for event in events]


def test_every_update_is_reported_once_in_order_with_its_own_numbers(tmp_path):
    ended, events, saved = run(tmp_path, task(total=5))
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5]
    assert [event.loss for event in steps] == [10.0, 9.0, 8.0, 7.0, 6.0]
    assert [event.learning_rate for event in steps] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert {(event.tokens, event.learned, event.metrics["accuracy"]) for event in steps} == {(6, 4, 0.5)}
    assert saved == [2, 4, 5]
    assert float(ended.state.trainable["w"]) == 5
    assert ended.last_loss == 6.0


def test_a_source_of_batches_sees_the_state_that_its_batch_updates(tmp_path):
    calls = []

    class FromState:
        uses_state, progress, stop_signal, kl_coef = True, None, None, None

        def next(self, step, state):
            calls.append((step, float(state.trainable["w"])))
            return rows(step)

        def close(self):
            calls.append("closed")

    run(tmp_path, task(total=5, start=2, batches=FromState()))
    assert calls == [(2, 2.0), (3, 3.0), (4, 4.0), "closed"]


def test_a_slow_update_is_announced_before_it_and_is_not_one_of_those_that_tell_the_speed(tmp_path):
    work = task(total=5, announce=lambda done: "computing the projectors" if done in (0, 3) else None)
    _, events, _ = run(tmp_path, work)
    assert [event.slow for event in events if isinstance(event, Stepped)] == [True, False, False, True, False]
    notes = [place for place, event in enumerate(events) if isinstance(event, Note)]
    assert [events[place].text for place in notes] == ["computing the projectors"] * 2  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(events[notes[0] - 1], Started)


def test_what_is_evaluated_and_sampled_from_is_what_the_optimizer_shows(tmp_path):
    calls = []
    cadence = Cadence(2, evaluations(1, 2, lambda step: (0, step)), at_interval(None, 2), never)
    work = task(
        total=2,
        cadence=cadence,
        shown=lambda state: float(state.trainable["w"]) / 2,
        evaluate=lambda shown: calls.append(("eval", shown)) or Evaluation(1.0, {}, 4.0),
        sample=lambda shown: calls.append(("sample", shown)) or [],
    )
    run(tmp_path, work)
    assert calls == [("sample", 0.0), ("eval", 0.5), ("eval", 1.0), ("sample", 1.0)]


def test_what_is_due_comes_after_the_report_evaluation_before_sample_before_save(tmp_path):
    losses = iter([5.0, 4.0, 4.5])
    cadence = Cadence(4, evaluations(2, 4, lambda step: (0, step)), at_interval(None, 4), at_interval(3, 4))
    work = task(
        cadence=cadence,
        evaluate=lambda trainable: Evaluation(next(losses), {"accuracy": float(trainable["w"])}, 1.0),
        evaluate_at_start=True,
        sample=lambda trainable: [("p", f"{float(trainable['w'])}", ())],
    )
    ended, events, _ = run(tmp_path, work)
    order = ["start", "eval0", "sample0", "1", "2", "eval2", "save2", "3", "save3", "4", "eval4", "sample4", "save4"]
    assert event_names(events) == [*order, "stop4"]
    evaluated_events = [event for event in events if isinstance(event, Evaluated)]
    assert [event.metrics["accuracy"] for event in evaluated_events] == [0.0, 2.0, 4.0], (
        "each sees the weights of its update"
    )
    assert [event.best for event in evaluated_events] == [False, True, False], (
        "the evaluation at the start does not count"
    )
    assert ended.early_stopping.best.step == 2


def test_a_resumed_loop_makes_the_rest_and_repeats_nothing_due_before(tmp_path):
    work = task(total=6, start=4, sample=lambda trainable: [("p", "t", ())])
    ended, events, _ = run(tmp_path, work)
    assert event_names(events) == ["start", "5", "6", "save6", "stop6"]
    assert float(ended.state.trainable["w"]) == 6
    assert events[1].loss == 6.0, "the batch of update 5, not of update 1"


def test_a_loss_that_is_not_finite_stops_with_update_micro_batch_and_records(tmp_path):
    recorder = Recorder()
    with pytest.raises(UserError) as caught:
        run(tmp_path, task(total=9, bad=4), sink=recorder)
    assert "the loss is nan in update 5, micro-batch 2 of 2; the update was not made" in caught.value.what
    assert "the checkpoint of update 4 is kept" in caught.value.what
    assert caught.value.where == "data.jsonl, record 9"
    assert [event.step for event in recorder.events if isinstance(event, Stepped)] == [1, 2, 3, 4]
    with Checkpoints(tmp_path, keep=99) as checkpoints:
        assert checkpoints.steps() == [2, 4]
        assert float(checkpoints.restore(4, begin()).trainable["w"]) == 4


def test_no_checkpoint_is_made_of_an_update_that_was_refused(tmp_path):
    with pytest.raises(UserError, match="update 4"):
        run(tmp_path, task(total=9, bad=3))
    with Checkpoints(tmp_path, keep=99) as checkpoints:
        assert checkpoints.steps() == [2]


def test_early_stopping_counts_evaluations_without_improvement_and_goes_on_counting_after_a_resume(tmp_path):
    losses = [3.0, 2.0, 1.95, 2.5, 1.99]  # min_delta 0.1: after 2.0 nothing improves
    cadence = Cadence(9, at_interval(1, 9), never, at_interval(1, 9))

    def work(start, state):
        return task(
            start=start,
            cadence=cadence,
            early_stopping=state,
            evaluate=lambda trainable: Evaluation(losses[int(trainable["w"]) - 1], {}, 1.0),
        )

    ended, events, _ = run(tmp_path / "a", work(0, EarlyStopping(3, 0.1)))
    assert (ended.step, ended.early_stopping.best.step) == (5, 2)
    assert "no improvement in 3 evaluations; the best was 2.0000 after 2" in events[-1].reason
    with Checkpoints(tmp_path / "a", keep=99) as checkpoints:
        halfway = checkpoints.record(4)
    again, _, _ = run(tmp_path / "b", work(4, EarlyStopping(3, 0.1, halfway.best, halfway.stale)))
    assert (again.step, again.early_stopping) == (5, ended.early_stopping)
    over, events, _ = run(tmp_path / "c", work(5, ended.early_stopping))
    assert over.step == 5, "a run that had stopped stays stopped"
    assert event_names(events) == ["start", "stop5"]


def test_losses_that_are_not_numbers_never_are_the_best():
    state = EarlyStopping(2, 0.0).after(1, float("nan")).after(2, float("nan"))
    assert state.stop
    assert state.best is None


def test_a_signal_ends_the_loop_after_the_update_under_way_and_saves_it(tmp_path):
    class Impatient(Recorder):
        def receive(self, event):
            super().receive(event)
            if isinstance(event, Stepped) and event.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with interruptible() as interrupt:
        work = task(total=50, cadence=Cadence(50, never, never, at_interval(None, 50)))
        ended, events, saved = run(tmp_path, work, interrupt=interrupt, sink=Impatient())
    assert signal.getsignal(signal.SIGTERM) is before
    assert ended.interrupted == signal.SIGTERM
    assert saved == [ended.step]
    assert 3 <= ended.step <= 5
    reported = [event.step for event in events if isinstance(event, Stepped)]
    assert reported == list(range(1, ended.step + 1)), "also the last update is reported"
    assert events[-1] == Stopped(ended.step, "SIGTERM")


def test_a_second_signal_does_not_wait():
    def twice():
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()


def test_evaluations_at_the_end_of_each_epoch_and_of_the_run():
    place = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)].__getitem__  # epochs of 3 and 2 updates
    due = evaluations("epoch", 6, place)
    assert [step for step in range(7) if due(step)] == [3, 5, 6]
