"""The numbers of a run before it begins, and its prediction beside what is measured."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence

import jax
import psutil
from jax.stages import Compiled
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshtune.adapters.method import ParameterCounts
from meshtune.config.recipe import Recipe
from meshtune.costs.collectives import collectives_of
from meshtune.costs.hardware import Target
from meshtune.costs.roofline import roofline, work_of
from meshtune.errors import UserError, amount
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.runs.output import CONSOLE_LOG
from meshtune.setup.choices import Decision
from meshtune.setup.memory import size_in_words
from meshtune.setup.search import MESH, MICRO, apply_overrides, candidate_of, workload_of
from meshtune.train.report.events import Evaluated, Event, Sampled, Saved, Stepped
from meshtune.train.report.page import REPORT
from meshtune.train.result.final import Result

OUTPUT_FILES = {
    "metrics.jsonl": "metrics",
    "loss.png": "plot",
    REPORT: "report",
    "samples.jsonl": "samples",
    "checkpoints": "checkpoints",
    CONSOLE_LOG: "console",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run. `state_bytes` covers weights, gradients and optimizer state."""

    model: str
    family: str
    counts: ParameterCounts
    method: str
    steps: int
    rows: int
    accumulation: int
    length: int
    tokens: float
    records: str
    optimizer: str
    state_bytes: int


def show_plan(console: Console, plan: Plan, decisions: Sequence[Decision]) -> None:
    """Prints the plan and the decisions, one line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    counts = plan.counts
    share = 100 * counts.trainable / max(1, counts.total)
    table.add_row(
        "model", f"{plan.model} [dim]({plan.family}, {in_words(counts.total - counts.adapters)} parameters)[/]"
    )
    table.add_row("method", f"{plan.method} [dim]({in_words(counts.trainable)} trainable, {share:.3g}%)[/]")
    micro = f" in {plan.accumulation} micro-batches" if plan.accumulation > 1 else ""
    table.add_row(
        "plan",
        f"{amount(plan.steps, 'update')} of {plan.rows} x {plan.length} tokens{micro} "
        f"[dim](about {in_words(plan.tokens)} real tokens each, from {plan.records})[/]",
    )
    table.add_row("optimizer", plan.optimizer)
    table.add_row(
        "memory", f"{size_in_words(plan.state_bytes)} [dim]weights, gradients, optimizer; activations below[/]"
    )
    for choice in decisions:
        name = f"[{choice.style}]{choice.name}[/]"
        table.add_row(name, f"{escape(choice.value)} [dim]({escape(choice.reason)})[/]")
    console.print(table)


def in_words(count: float) -> str:
    """Abbreviates a count: 1234567 -> '1.23M'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def show_summary(console: Console, result: Result, exported: int) -> None:
    """Prints the outcome of a run and the paths of its outputs."""
    last = ""
    if result.loss is not None and result.smoothed_loss is not None:
        smoothed = f", smoothed loss {result.smoothed_loss:.4f} (of the last update alone {result.loss:.4f})"
        last = f", loss {result.loss:.4f}" if result.smoothed_loss == result.loss else smoothed
    console.print(f"\n[bold green]done[/]: {amount(result.steps, 'update')} in {result.seconds:.1f} s{last}")
    if result.best is not None:
        console.print(f"best validation loss {result.best.loss:.4f} after update {result.best.step}")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("result", f"{result.path} [dim](of update {exported}, read back and verified)[/]")
    for name, label in OUTPUT_FILES.items():
        path = result.output / name
        if path.is_dir() or (path.is_file() and path.stat().st_size):
            table.add_row(label, str(path))
    console.print(table)


MIN_COMPARED_BYTES = 256 << 20  # of smaller steps, the process's other allocations are as large as the step
MIN_COMPARED_SECONDS = 0.1  # of shorter steps, what surrounds the arithmetic takes as long as the arithmetic
WARM_UP = 2  # updates that are not timed: the first ones wait for data, caches and libraries


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted cost of a compiled step. `device_bytes` is the peak per device, `argument_bytes` the part resident
    before the step; `device` is the target it was predicted for. None if unknown.
    """

    device_bytes: int | None
    argument_bytes: int | None
    step_seconds: float | None
    mfu: float | None
    device: str


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Measured cost of a run's step: peak bytes of the fullest device, and the median seconds of `updates` updates."""

    device_bytes: int | None
    step_seconds: float | None
    updates: int


def predict(compiled: Compiled, recipe: Recipe, target: Target, layout: Layout | None, length: int) -> Prediction:
    """Predicts memory from the compiler's figures and time from the roofline. `recipe` must have no open keys."""
    memory = compiled.memory_analysis()
    peak = resident = None
    if memory is not None:
        resident = int(memory.argument_size_in_bytes)
        peak = int(resident + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes)
    seconds = mfu = None
    if recipe.rollout is not None:  # how many of its rows are filled depends on the completions
        return Prediction(peak, resident, seconds, mfu, str(target))
    try:
        workload = workload_of(recipe, target.device.backend, target.device.arch)
        candidate = candidate_of(_fill_open_keys(recipe, layout), target, workload, length=length)
        collectives = collectives_of(compiled.as_text() or "", target.devices)
        dtype, trips = workload.precision.compute, candidate.loss_chunks
        times = roofline(work_of(candidate), collectives, target, dtype=dtype, trip_count=trips)
        seconds, mfu = times.seconds, times.mfu
    except UserError:
        pass  # the speeds of this device are not described: memory is predicted nevertheless
    return Prediction(peak, resident, seconds, mfu, str(target))


def _fill_open_keys(recipe: Recipe, layout: Layout | None) -> Recipe:
    """The recipe with the mesh of its layout, and the whole batch as the micro-batch if that is open."""
    if not isinstance(recipe.mesh, MeshConfig):
        mesh = {} if layout is None else {axis: size for axis, size in layout.mesh.shape.items() if size > 1}
        recipe = apply_overrides(recipe, {MESH: mesh or {"fsdp": 1}})
    if recipe.train.micro_batch == "auto":
        recipe = apply_overrides(recipe, {MICRO: recipe.train.batch_size})
    return recipe


class StepProbe:
    """An event sink that measures the median time of an update and the peak memory of a step.

    It must be created when weights and state are loaded and the step is compiled. The peak is taken until the run does
    anything but updates. On accelerators the allocator reports it; on Linux CPUs it is the growth of the process on top
    of the step's arguments.
    """

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._arguments = prediction.argument_bytes or 0
        self._seconds: list[float] = []
        self._peak: int | None = None
        self._after_pause = True  # the next update's time includes work that is not the step's
        self._only_updates = True
        self._baseline = resident_bytes() if reset_high_water_mark() else None

    def receive(self, event: Event) -> None:
        match event:
            case Stepped():
                if self._only_updates:
                    self._peak = self._peak_bytes()
                if not self._after_pause and not event.slow:
                    self._seconds.append(event.seconds)
                self._after_pause = False
            case Evaluated() | Sampled() | Saved():
                if self._peak is None:  # before the first update: the measurement starts anew
                    self._baseline = resident_bytes() if reset_high_water_mark() else None
                else:
                    self._only_updates = False
                self._after_pause = True

    def close(self) -> None:
        """Does nothing: the probe holds no resources."""

    def measurement(self) -> MeasuredStep:
        timed = self._seconds[WARM_UP:] or self._seconds
        return MeasuredStep(self._peak, statistics.median(timed) if timed else None, len(timed))

    def _peak_bytes(self) -> int | None:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if all("peak_bytes_in_use" in device for device in stats):
            return max(int(device["peak_bytes_in_use"]) for device in stats)
        high_water_mark = high_water_bytes()
        if self._baseline is None or high_water_mark is None:
            return None
        return self._arguments + max(0, high_water_mark - self._baseline) // max(1, jax.local_device_count())


def step_probes(
    step: Callable[..., object], recipe: Recipe, target: Target, layout: Layout | None, length: int
) -> list[StepProbe]:
    """A StepProbe for a compiled step; none for a step that is not compiled ahead of time."""
    return [StepProbe(predict(step, recipe, target, layout, length))] if isinstance(step, Compiled) else []


def summary_lines(probes: Sequence[StepProbe], write: Callable[[dict[str, object]], None]) -> list[str]:
    """The lines that end a run's console output; `write` gets both sides for run.json."""
    lines = []
    for probe in probes:
        measured = probe.measurement()
        write({"prediction": to_json(probe.prediction, measured)})
        lines += [f"[bold]predicted[/] {line}" for line in predicted_vs_measured(probe.prediction, measured)]
    return lines


def predicted_vs_measured(prediction: Prediction, measured: MeasuredStep) -> list[str]:
    """A line for memory and one for time, each only where both sides are known."""
    lines = []
    if prediction.device_bytes and measured.device_bytes:
        ratio = measured.device_bytes / prediction.device_bytes - 1
        sizes = f"{size_in_words(prediction.device_bytes)} of memory per device, "
        sizes += f"{size_in_words(measured.device_bytes)} measured"
        compared = f"{100 * ratio:+.0f}%" if prediction.device_bytes > MIN_COMPARED_BYTES else "too small to compare"
        lines.append(f"{sizes} ({compared})")
    if prediction.step_seconds and measured.step_seconds:
        times = f"{measured.step_seconds / prediction.step_seconds:.2f} times as long"
        if prediction.step_seconds < MIN_COMPARED_SECONDS:
            times = "too short to compare"
        lines.append(
            f"{prediction.step_seconds:.3g} s per update, {measured.step_seconds:.3g} s measured "
            f"({times}; the median of {measured.updates})"
        )
    return lines


def to_json(prediction: Prediction, measured: MeasuredStep) -> dict[str, object]:
    """The form in run.json."""
    return {"predicted": dataclasses.asdict(prediction), "measured": dataclasses.asdict(measured)}


def reset_high_water_mark() -> bool:
    """Resets the kernel's high-water mark of this process's memory; returns whether it could (Linux only)."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def high_water_bytes() -> int | None:
    """Peak resident bytes of this process since its start or since `reset_high_water_mark`; None if unavailable."""
    try:
        text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), None)
    return int(line.split()[1]) * 1024 if line else None


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)
