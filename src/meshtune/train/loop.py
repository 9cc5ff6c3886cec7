"""The training loop: runs updates, and evaluates, samples and saves at the configured intervals.

Metrics of an update are fetched while the next one runs, so the device never waits for the host. The loop checks that
the metrics of the last update are finite before it saves, evaluates or samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, named_leaves
from meshtune.errors import StopRequested, UserError, amount
from meshtune.mesh.agreement import StopFlag
from meshtune.model.gather import to_device
from meshtune.setup.memory import memory_in_use
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
from meshtune.train.checkpoint.save_timer import SaveTimer
from meshtune.train.evaluation.evaluate import Cadence, EarlyStopping, Evaluation
from meshtune.train.report.events import (
    Evaluated,
    Event,
    Events,
    Generating,
    Note,
    RolledOut,
    Sampled,
    Saved,
    Started,
    Stepped,
    Stopped,
)
from meshtune.train.report.metrics_log import DeviceMetrics
from meshtune.train.step.state import Metrics, TrainState
from meshtune.train.watchdog import Watchdog

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_PATIENCE = (
    10.0  # seconds that updates wait for the save before, so that saves of short runs are where they are due
)


class Interrupt:
    """`received` is the signal's number once one has come, else None. A second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Takes over SIGINT and SIGTERM for a block. In a thread other than the main one nothing can be taken over."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


UPDATES = 3  # that are watched together: the first one alone leaves some weights as they are, such as an adapter's A
FULL_RATE = 0.5  # of the peak: during a warm-up even updates that will be large enough later are lost
LEAST = 0.5  # the share of weights that changes where updates are large enough
SAMPLE = 2**20  # numbers of a parameter that are compared


@dataclasses.dataclass
class LostUpdates:
    """Compares a sample of the trained weights narrower than float32 before and after the first updates at full rate.

    `abstract` are the ArraySpecs of the trainable tree, `rates` the learning rate of every update. Matrices alone are
    compared: rows of an embedding whose tokens do not occur, and experts that are not used, have no gradient.
    """

    abstract: Tree
    rates: np.ndarray
    start: int

    def __post_init__(self) -> None:
        narrow = {path: array for path, array in named_leaves(self.abstract) if _is_narrow(array)}
        matrices = {path for path, array in narrow.items() if array.role == "matrix"}
        self._dtype = next((array.dtype for array in narrow.values()), "")
        self._compared = frozenset(matrices or narrow)
        full = np.flatnonzero(self.rates[self.start :] >= FULL_RATE * self.rates.max(initial=0.0))
        self._first = self.start + int(full[0]) if len(full) else len(self.rates)
        self._last = min(self._first + UPDATES, len(self.rates))
        self._before: list[jax.Array] | None = None

    def before(self, trainable: Tree, done: int) -> None:
        """Keeps a sample of the weights where the updates to watch begin; `done` updates were made."""
        if done == self._first and self._compared and self._last - self._first > 1:
            self._before = jax.jit(self._sample)(trainable)

    def after(self, trainable: Tree, done: int) -> str | None:
        """A warning after the last update to watch, if most of its weights are what they were."""
        if self._before is None or done != self._last:
            return None
        share = float(jax.jit(self._share_changed)(self._before, trainable))
        self._before = None
        if share >= LEAST:
            return None
        rate = self.rates[self._first]
        return (
            f"warning: only {100 * share:.2g}% of the weights in {self._dtype} changed in updates {self._first + 1} to "
            f"{self._last}: at a rate of {rate:.2g} most updates are rounded away. Set compute.precision=mixed "
            "(float32 weights), or optimizer.stochastic_rounding=true (no more memory), or a higher learning rate"
        )

    def _sample(self, trainable: Tree) -> list[jax.Array]:
        leaves = [leaf for path, leaf in named_leaves(trainable) if path in self._compared]
        return [to_device(leaf[tuple(slice(0, size) for size in _sample_shape(leaf.shape))]) for leaf in leaves]

    def _share_changed(self, before: list[jax.Array], trainable: Tree) -> jax.Array:
        pairs = zip(before, self._sample(trainable), strict=True)
        return sum((jnp.sum(old != new, dtype=jnp.float32) for old, new in pairs), jnp.float32(0)) / sum(
            leaf.size for leaf in before
        )


def _is_narrow(array: ArraySpec) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and jnp.dtype(array.dtype).itemsize < 4


def _sample_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the first rows of a matrix, or of each layer's, that have at most SAMPLE numbers together."""
    if len(shape) < 2:
        return shape
    leading = int(np.prod(shape[:-2])) * shape[-1]
    return (*shape[:-2], max(1, min(shape[-2], SAMPLE // leading)), shape[-1])


MOST_RECORDS = 12  # records named in an error message


PlacedBatch = Mapping[str, jax.Array | np.ndarray]  # a batch's arrays on the devices


class TrainBatch(Protocol):
    """The rows of one update, such as a data.loader.HostBatch."""

    @property
    def arrays(self) -> dict[str, np.ndarray]: ...

    @property
    def origins(self) -> Sequence[Sequence[Sequence[object]]]: ...

    @property
    def step(self) -> int: ...

    @property
    def counts(self) -> tuple[int, int] | None:
        """The tokens, and those with a weight, that this process alone has, where the batch is divided."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the rows, which are reported with those of the update."""
        ...

    @property
    def seconds(self) -> float:
        """The time that it took to generate rows, which is no part of the update's."""
        ...

    @property
    def rollout_rows(self) -> Sequence[Mapping[str, object]]:
        """The completions of a rollout that begins with this batch."""
        ...


class BatchSource(Protocol):
    """Provides the batch of every update. It sees the state, from which an online stage generates its rows.

    Where it `uses_state`, the update before is reported, and is known to be finite, when the next batch is asked for;
    it may call `progress(done, total)` while it makes one, and raise StopRequested if `stop_signal()` gives a signal;
    the loop sets both. `kl_coef` is state that is saved with checkpoints: the weight of a KL divergence that is steered
    to a target.
    """

    uses_state: bool
    kl_coef: float | None
    progress: Callable[[int, int], None] | None
    stop_signal: Callable[[], int | None] | None

    def next(self, step: int, state: TrainState) -> TrainBatch:
        """The batch of update `step`, counted from 0. Steps come in order; `state` is the one to be updated."""
        ...

    def close(self) -> None: ...


class LoadedBatches:
    """Batches that are read ahead of the updates, since they depend only on the step.

    `iterate(start, stop)` yields the batches of the updates from `start` up to, not including, `stop`.
    """

    uses_state = False
    kl_coef: float | None = None
    progress: Callable[[int, int], None] | None = None
    stop_signal: Callable[[], int | None] | None = None

    def __init__(self, iterate: Callable[[int, int], Iterable[TrainBatch]], start: int, stop: int):
        self._iterate, self._start, self._stop = iterate, start, stop
        self._batches: Iterator[TrainBatch] | None = None

    def next(self, step: int, state: TrainState) -> TrainBatch:
        if self._batches is None:
            self._batches = iter(self._iterate(self._start, self._stop))
        batch = next(self._batches)
        assert batch.step == step, f"the batch of update {batch.step} for update {step}"
        return batch

    def close(self) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


@dataclasses.dataclass(frozen=True)
class Task:
    """The functions and settings that a loop runs with.

    `record` is the checkpoint record to start from and `epoch_at(step)` the fractional epoch. `place` puts a batch's
    arrays on the devices. `shown(state)` returns the parameters to evaluate, sample from and export, which for some
    optimizers are not the trained ones. `evaluate(trainable)` and `sample(trainable)`, which returns
    (prompt, text, pictures) triples, are optional, as is `lost_updates`, which warns of updates that are rounded away.
    Each of `saved` is called with (trainable, step) after each save. `save_timer` asks for saves besides those of the
    cadence; process 0 decides for all, and lets none begin while one is written. The best state and the last are saved
    all the same, after a wait. `watchdog` ends a job that stands still. `announce(done)` says what
    makes the next update slower than others, if so.
    """

    step: Callable[[TrainState, Tree, PlacedBatch, np.int32], tuple[TrainState, Metrics]]
    frozen: Tree
    batches: BatchSource
    learning_rate: Callable[[int], float]
    epoch_at: Callable[[int], float]
    cadence: Cadence
    record: Record
    early_stopping: EarlyStopping
    keep_best: bool
    place: Callable[[dict[str, np.ndarray]], PlacedBatch] = dict
    shown: Callable[[TrainState], Tree] = operator.attrgetter("trainable")
    evaluate: Callable[[Tree], Evaluation] | None = None
    evaluate_at_start: bool = False
    sample: Callable[[Tree], Iterable[tuple[str, str, tuple[str, ...]]]] | None = None
    saved: Sequence[Callable[[Tree, int], None]] = ()
    save_timer: SaveTimer = dataclasses.field(default_factory=SaveTimer)
    watchdog: Watchdog = dataclasses.field(default_factory=Watchdog)
    lost_updates: LostUpdates | None = None
    announce: Callable[[int], str | None] = lambda done: None


@dataclasses.dataclass(frozen=True)
class Ended:
    """The result of a loop: the state after `step` updates. `interrupted` is the signal that stopped it, or None."""

    state: TrainState
    step: int
    early_stopping: EarlyStopping
    interrupted: int | None
    last_loss: float | None
    last_evaluation: float | None


def run_loop(task: Task, state: TrainState, checkpoints: Checkpoints, events: Events, interrupt: Interrupt) -> Ended:
    """Runs the updates from `task.record.step` to the last. The buffers of `state` are donated.

    Raises: UserError for a loss or gradient that is not finite (it names the update, micro-batch and records; the
    update is not applied) and for a checkpoint that cannot be written.
    """
    return _Loop(task, state, checkpoints, events, interrupt).run()


class _Loop:
    def __init__(self, task: Task, state: TrainState, checkpoints: Checkpoints, events: Events, interrupt: Interrupt):
        self.task, self.state = task, state
        self.checkpoints, self.events, self.interrupt = checkpoints, events, interrupt
        self.early_stopping = task.early_stopping
        self.seed = np.int32(task.record.seed)
        self.stop_flag = StopFlag()
        self.devices = DeviceMetrics()
        self.stop = 0  # the signal that all processes have agreed to stop on
        self.seconds = 0.0
        self.saved: int | None = None
        self.save_due = False  # as all processes have agreed
        self.save_waits = False  # until the one before is written
        self.last_loss: float | None = None
        self.last_evaluation: float | None = None
        self.clock = time.perf_counter()
        if task.batches.uses_state:
            task.batches.progress = lambda done, total: self._emit(Generating(done, total))
            task.batches.stop_signal = lambda: interrupt.received

    def run(self) -> Ended:
        done, total = self.task.record.step, self.task.cadence.total
        self.events.emit(Started(done, total))
        if done == 0:
            with contextlib.suppress(StopRequested):  # the first batch raises it again
                self._at_start()
        self.clock = time.perf_counter()
        if not self.early_stopping.stop:
            with self.task.watchdog:
                done = self._updates(done, total)
        self.events.emit(Stopped(done, self._reason(done)))
        return Ended(self.state, done, self.early_stopping, self.stop or None, self.last_loss, self.last_evaluation)

    def _updates(self, start: int, total: int) -> int:
        done, pending = start, None
        try:
            while done < total and not self._stopping() and not self.early_stopping.stop:
                if self.task.batches.uses_state and pending is not None:
                    self._report(*pending)
                    pending = None
                with self.task.watchdog.pause() if self.task.batches.uses_state else contextlib.nullcontext():
                    batch = self.task.batches.next(done, self.state)
                if batch.rollout_rows:
                    self._emit(RolledOut(done + 1, batch.rollout_rows))
                if self.task.batches.uses_state:
                    self.clock = time.perf_counter()
                arrays = self.task.place(batch.arrays)
                announcement = self.task.announce(done)
                if announcement is not None:
                    self._emit(Note(announcement))
                if self.task.lost_updates is not None:
                    self.task.lost_updates.before(self.state.trainable, done)
                self.task.watchdog.step()
                self.state, metrics = self.task.step(self.state, self.task.frozen, arrays, self.seed)
                self.checkpoints.check()
                self.stop_flag.submit(self.interrupt.received, self.seconds, self._may_save(done + 1), _counts(batch))
                self.task.watchdog.step()
                if pending is not None:
                    self._report(*pending)
                pending = (batch, metrics, announcement is not None)
                done += 1
                self._warn(done)
                if self._something_due(done):
                    self._report(*pending)
                    pending = None
                    with self.task.watchdog.pause():
                        self._whatever_is_due(done)
                    self.clock = time.perf_counter()
        except StopRequested as request:
            self.stop = request.number
        finally:
            self.task.batches.close()
        if pending is not None:
            self._report(*pending)
        if done > start and self.saved != done:
            with self.task.watchdog.pause():
                self._save(done)
        return done

    def _warn(self, done: int) -> None:
        warning = None if self.task.lost_updates is None else self.task.lost_updates.after(self.state.trainable, done)
        if warning is not None:
            self._emit(Note(warning))

    def _stopping(self) -> bool:
        """A single process stops at once. Several agree on the update to stop after, one update later."""
        if not self.stop_flag.multi_process:
            self.stop = self.interrupt.received or 0
        return self.stop != 0

    def _at_start(self) -> None:
        if self.task.evaluate is not None and self.task.evaluate_at_start:
            self._evaluate(0, counts=False)
        self._sample(0)

    def _something_due(self, done: int) -> bool:
        due = self.task.cadence
        return due.evaluate(done) or due.sample(done) or due.save(done) or self.save_due

    def _may_save(self, done: int) -> bool:
        """Whether this process asks for a save after `done` updates or, by the clock, after the next one."""
        if self.save_waits:
            return not self.checkpoints.writing
        if self.task.cadence.save(done):
            return self.checkpoints.wait_written(SAVE_PATIENCE)
        return self.task.save_timer.request(lambda: self.checkpoints.writing)

    def _whatever_is_due(self, done: int) -> None:
        due = self.task.cadence
        best = False
        if self.task.evaluate is not None and due.evaluate(done):
            best = self._evaluate(done, counts=True)
        if due.sample(done):
            self._sample(done)
        if self.save_due or (best and self.task.keep_best):
            self._save(done)
        elif due.save(done) and done < due.total and not self.save_waits:
            self.save_waits = True
            self._emit(Note(f"the save of update {done} waits until that of update {self.saved} is written"))

    def _report(self, batch: TrainBatch, metrics: Metrics, slow: bool) -> None:
        values = jax.device_get(metrics)
        decision = self.stop_flag.decision()
        self.stop = self.stop or decision.signal
        self.save_due = self.save_due or decision.save
        if not bool(values["finite"]) and values.get("loss_scale", 0.0) < 1:
            raise _not_finite(self.task, batch, values, self.checkpoints)
        self.task.watchdog.update()
        finished = time.perf_counter()
        seconds, self.clock = finished - self.clock, finished
        self.seconds = seconds
        step = batch.step + 1
        self.last_loss = float(values["loss"])
        tokens, learned = _counts(batch) if batch.counts is None else decision.counts
        reported = ("loss", "weight", "grad_norm", "finite", "finite_micro")
        self._emit(
            Stepped(
                step=step,
                epoch=self.task.epoch_at(step),
                loss=self.last_loss,
                grad_norm=float(values["grad_norm"]),
                learning_rate=self.task.learning_rate(max(0, batch.step - int(values.get("skipped_updates", 0)))),
                metrics={
                    **batch.metrics,
                    **{name: float(value) for name, value in values.items() if name not in reported},
                },
                tokens=tokens,
                learned=learned,
                seconds=seconds,
                rollout_seconds=batch.seconds,
                memory=memory_in_use(),
                slow=slow,
                machine=self.devices.read() | ({"skew": decision.skew} if self.stop_flag.multi_process else {}),
            )
        )

    def _evaluate(self, done: int, *, counts: bool) -> bool:
        assert self.task.evaluate is not None
        started = time.perf_counter()
        evaluation = self.task.evaluate(self.task.shown(self.state))
        before = self.early_stopping.best
        if counts:
            self.early_stopping = self.early_stopping.after(done, evaluation.loss)
        best = counts and self.early_stopping.best != before
        self.last_evaluation = evaluation.loss
        seconds = time.perf_counter() - started
        self._emit(Evaluated(done, self.task.epoch_at(done), evaluation.loss, evaluation.metrics, best, seconds))
        return best

    def _sample(self, done: int) -> None:
        if self.task.sample is not None:
            for prompt, text, pictures in self.task.sample(self.task.shown(self.state)):
                self._emit(Sampled(done, prompt, text, pictures))

    def _save(self, done: int) -> None:
        best, stale = self.early_stopping.best, self.early_stopping.stale
        record = dataclasses.replace(
            self.task.record, step=done, best=best, stale=stale, kl_coef=self.task.batches.kl_coef
        )
        started = time.monotonic()
        self.checkpoints.save(self.state, record, keep=best.step if best and self.task.keep_best else None)
        self.task.save_timer.note_save(time.monotonic() - started)
        self.saved, self.save_due, self.save_waits = done, False, False
        self._emit(Saved(done, self.checkpoints.path(done)))
        for saved in self.task.saved:
            saved(self.task.shown(self.state), done)

    def _emit(self, event: Event) -> None:
        self.events.emit(event)

    def _reason(self, done: int) -> str:
        if self.stop and done < self.task.cadence.total:
            return signal.Signals(self.stop).name
        if self.early_stopping.stop:
            best, stale = self.early_stopping.best, self.early_stopping.stale
            best_text = f"the best was {best.loss:.4f} after {best.step}" if best else "none was a number"
            return f"no improvement in {amount(stale, 'evaluation')}; {best_text}"
        return ""


def _counts(batch: TrainBatch) -> tuple[int, int]:
    """The tokens of a batch, and those with a weight; of this process where the batch is divided among several."""
    if batch.counts is not None:
        return batch.counts
    return int(np.count_nonzero(batch.arrays["segment_ids"])), int(np.count_nonzero(batch.arrays["weights"]))


def _not_finite(task: Task, batch: TrainBatch, values: Mapping[str, np.ndarray], checkpoints: Checkpoints) -> UserError:
    finite = np.atleast_1d(values["finite_micro"])
    bad = [number for number, fine in enumerate(finite) if not fine] or list(range(len(finite)))
    loss, norm = float(values["loss"]), float(values["grad_norm"])
    value = f"the loss is {loss}" if not np.isfinite(loss) else f"the gradient's norm is {norm}"
    other = "compute.precision=float32"
    if "loss_scale" in values:
        value = f"float16 overflows at any scale of the loss down to 1: {value}"
        other += " (mixed where the device has bfloat16)"
    which = ", ".join(str(number + 1) for number in bad)
    named = list(dict.fromkeys(str(origin) for number in bad for row in batch.origins[number] for origin in row))
    unnamed = f" and {len(named) - MOST_RECORDS} more" if len(named) > MOST_RECORDS else ""
    checkpoints.wait()
    saved = checkpoints.latest()
    status = f"the checkpoint of update {saved} is kept" if saved is not None else "no checkpoint was saved yet"
    lower = f"optimizer.learning_rate={task.learning_rate(batch.step) / 2:.1e}"
    again = f"go on from update {saved} with resume=true accept_changes=true" if saved else "start with resume=true"
    return UserError(
        f"{value} in update {batch.step + 1}, micro-batch {which} of {len(finite)}; the update was not made; {status}",
        where="; ".join(named[:MOST_RECORDS]) + unnamed,
        fix=f"look at these records; {again} and a lower rate ({lower}) or {other}",
    )
