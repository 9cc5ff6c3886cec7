"""What was predicted of a run beside what it took: memory of a device and seconds of an update, printed and filed."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import psutil

from meshtune.config.recipe import MeshSection, Recipe
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.plan.case import base_of
from meshtune.plan.collectives import collectives_of
from meshtune.plan.hardware import Target
from meshtune.plan.roofline import roofline
from meshtune.plan.search import MESH, MICRO, applied, case_of
from meshtune.plan.work import work_of
from meshtune.setup.memory import size_in_words
from meshtune.train.report.events import Evaluated, Event, Sampled, Saved, Stepped

SMALL = 256 << 20  # bytes; below it, what else a process allocates is as large as the step
WARM = 2  # updates that are not timed: the first waits for data, caches and libraries


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of a compiled step on this machine: bytes of one device, of them those that are there before it runs
    (`argument_bytes`), and seconds of an update; None what nobody can say. `device` is how the device was described.
    """

    device_bytes: int | None
    argument_bytes: int | None
    step_seconds: float | None
    mfu: float | None
    device: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run took: bytes of the device that held most, seconds of the median update, of `updates` timed ones."""

    device_bytes: int | None
    step_seconds: float | None
    updates: int


def predict(compiled: Any, recipe: Recipe, target: Target, layout: Layout | None, length: int) -> Prediction:
    """What the compiler and the roofline say of a step that was compiled here; `recipe` has nothing open."""
    facts = compiled.memory_analysis()
    needed = held = None
    if facts is not None:
        held = int(facts.argument_size_in_bytes)
        needed = int(held + facts.output_size_in_bytes - facts.alias_size_in_bytes + facts.temp_size_in_bytes)
    seconds = mfu = None
    try:
        base = base_of(recipe, target.device.backend)
        mesh = {"fsdp": 1} if layout is None else {axis: size for axis, size in layout.mesh.shape.items() if size > 1}
        whole = applied(recipe, {MESH: mesh or {"fsdp": 1}}) if not isinstance(recipe.mesh, MeshSection) else recipe
        whole = whole if whole.train.micro_batch != "auto" else applied(whole, {MICRO: whole.train.batch_size})
        case = case_of(whole, target, base, length=length)
        messages = collectives_of(compiled.as_text(), target.devices)
        turns = -(-length // max(1, case.loss_chunk))
        times = roofline(work_of(case), messages, target, dtype=base.precision.compute, turns=turns)
        seconds, mfu = times.seconds, times.mfu
    except UserError:
        pass  # the device's speeds are not described: memory is told all the same
    return Prediction(needed, held, seconds, mfu, str(target))


def watch(step: Any, recipe: Recipe, target: Target, layout: Layout | None, length: int) -> list[Watch]:
    """A Watch for a compiled step, or none for one that is not."""
    if not hasattr(step, "memory_analysis"):
        return []
    return [Watch(predict(step, recipe, target, layout, length))]


def told(watches: Sequence[Watch], write: Callable[[dict[str, Any]], None]) -> list[str]:
    """Both sides in words, for the end of a run; `write` gets them for run.json."""
    lines = []
    for one in watches:
        measured = one.measured()
        write({"truth": plain(one.prediction, measured)})
        lines += [f"[bold]predicted[/] {line}" for line in in_words(one.prediction, measured)]
    return lines


class Watch:
    """The sink that measures: the median update, and the most memory until anything but updates is done.

    Made when weights and state are there and the step is compiled. On accelerators the allocator tells the most that
    was ever in use; on Linux CPUs it is what the process grew by, on top of the step's arguments.
    """

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._arguments = prediction.argument_bytes or 0
        self._seconds: list[float] = []
        self._peak: int | None = None
        self._fresh = True
        self._clean = True
        self._before = resident_bytes() if resets_high_water() else None

    def receive(self, event: Event) -> None:
        match event:
            case Stepped():
                if self._clean:
                    self._peak = self._most()
                if not self._fresh:
                    self._seconds.append(event.seconds)
                self._fresh = False
            case Evaluated() | Sampled() | Saved():
                if self._peak is None:  # before the first update: from here on is what counts
                    self._before = resident_bytes() if resets_high_water() else None
                else:
                    self._clean = False
                self._fresh = True

    def close(self) -> None:
        """Nothing is held."""

    def measured(self) -> Measured:
        timed = self._seconds[WARM:] or self._seconds
        return Measured(self._peak, statistics.median(timed) if timed else None, len(timed))

    def _most(self) -> int | None:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if all("peak_bytes_in_use" in one for one in stats):
            return max(int(one["peak_bytes_in_use"]) for one in stats)
        high = high_water_bytes()
        if self._before is None or high is None:
            return None
        return self._arguments + max(0, high - self._before) // max(1, jax.local_device_count())


def in_words(prediction: Prediction, measured: Measured) -> list[str]:
    """A line for memory and one for time, where both sides are known."""
    lines = []
    if prediction.device_bytes and measured.device_bytes:
        ratio = measured.device_bytes / prediction.device_bytes - 1
        predicted, found = size_in_words(prediction.device_bytes), size_in_words(measured.device_bytes)
        beside = f"{100 * ratio:+.0f}%" if prediction.device_bytes > SMALL else "too small to compare"
        lines.append(f"{predicted} of memory a device, {found} measured ({beside})")
    if prediction.step_seconds and measured.step_seconds:
        ratio = measured.step_seconds / prediction.step_seconds
        lines.append(
            f"{prediction.step_seconds:.3g} s an update, {measured.step_seconds:.3g} s measured "
            f"({ratio:.2f} times as long; the median of {measured.updates})"
        )
    return lines


def plain(prediction: Prediction, measured: Measured) -> dict[str, Any]:
    """For run.json."""
    return {"predicted": dataclasses.asdict(prediction), "measured": dataclasses.asdict(measured)}


def resets_high_water() -> bool:
    """Makes the kernel count the most memory of this process anew; whether it could (Linux alone)."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def high_water_bytes() -> int | None:
    """The most memory this process held since it began or since `resets_high_water`; None where nothing tells."""
    try:
        text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), None)
    return int(line.split()[1]) * 1024 if line else None


def resident_bytes() -> int:
    """What this process holds now."""
    return int(psutil.Process().memory_info().rss)
