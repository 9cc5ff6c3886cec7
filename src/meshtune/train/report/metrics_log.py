"""The metrics of every update, and those of devices, as lines of JSON.

Each line is written at once, so a killed process leaves at most one incomplete line. Each ends with the CRC-32 of the
rest of it, so that a resumed run finds damaged lines. A resumed run truncates the files to its
checkpoint; apart from `TIMINGS` they then equal those of an uninterrupted run.

Memory comes from JAX; the rest from `nvidia-ml-py` or AMD's `amdsmi` where installed. A reading takes milliseconds: a
few driver calls per device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshtune.mesh.accelerators import VISIBLE_DEVICE_VARIABLES
from meshtune.runs.output import LOGS, ROLLOUTS
from meshtune.train.report.events import Evaluated, Event, RolledOut, Sampled, Stepped

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
CHECKSUM = "crc32"
# Columns that differ between identical runs.
TIMINGS = frozenset({"seconds", "rollout_seconds", "tokens_per_second", "memory", "machine", CHECKSUM})
LAST_COLUMNS = frozenset({"memory", "machine", "seconds", "text"})  # of lines of versions that wrote no checksums
_CHECKED = re.compile(rb'(.*), "crc32": ([0-9]{1,10})\}\n', re.DOTALL)


class MetricsLog:
    """The sink that writes both files. A training line is written every `interval` updates."""

    def __init__(self, output: pathlib.Path, *, interval: int = 1):
        self._interval = interval
        # Append mode never overwrites existing lines, even with two writers.
        self._metrics = (output / METRICS).open("a", encoding="utf-8", buffering=1)
        self._samples = (output / SAMPLES).open("a", encoding="utf-8", buffering=1)
        self._output, self._rollouts = output, None

    def receive(self, event: Event) -> None:
        match event:
            case Stepped() if event.step % self._interval == 0:
                self._metrics.write(format_line(train_row(event)))
            case Evaluated():
                self._metrics.write(format_line(eval_row(event)))
            case RolledOut():
                if self._rollouts is None:
                    self._rollouts = (self._output / ROLLOUTS).open("a", encoding="utf-8", buffering=1)
                self._rollouts.writelines(format_line({"step": event.step, **row}) for row in event.rows)
            case Sampled():
                pictures = {"pictures": list(event.pictures)} if event.pictures else {}
                self._samples.write(
                    format_line({"step": event.step, "prompt": event.prompt, "text": event.text} | pictures)
                )

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._rollouts is not None:
            self._rollouts.close()


class ProcessLog:
    """The sink for device metrics of processes other than the first: logs/process-N.metrics.jsonl."""

    def __init__(self, output: pathlib.Path, process: int, *, interval: int = 1):
        self._interval = interval
        folder = output / LOGS
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"process-{process}.{METRICS}").open("a", encoding="utf-8", buffering=1)

    def receive(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.step % self._interval == 0:
            row = train_row(event)
            self._file.write(
                format_line({key: row[key] for key in ("step", "seconds", "memory", "machine") if key in row})
            )

    def close(self) -> None:
        self._file.close()


def train_row(event: Stepped) -> dict[str, object]:
    """Returns the JSON object of one update."""
    return {
        "kind": "train",
        "step": event.step,
        "epoch": round(event.epoch, 6),
        "loss": event.loss,
        **event.metrics,
        "grad_norm": event.grad_norm,
        "learning_rate": event.learning_rate,
        "tokens": event.tokens,
        "learned_tokens": event.learned,
        "seconds": round(event.seconds, 6),
        **({"rollout_seconds": round(event.rollout_seconds, 6)} if event.rollout_seconds else {}),
        "tokens_per_second": round(event.tokens / event.seconds, 3) if event.seconds else None,
        "memory": event.memory,
        **({"machine": event.machine} if event.machine else {}),
    }


def eval_row(event: Evaluated) -> dict[str, object]:
    """Returns the JSON object of one evaluation."""
    return {
        "kind": "eval",
        "step": event.step,
        "epoch": round(event.epoch, 6),
        "loss": event.loss,
        **event.metrics,
        "best": event.best,
        "seconds": round(event.seconds, 6),
    }


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the undamaged lines of a file, without checksums; [] if the file does not exist."""
    return [line.row for line in _read_lines(path)[0]]


def cut_back(output: pathlib.Path, step: int | None, *, interval: int = 1) -> list[str]:
    """Truncates both files to their lines up to update `step` (None: all lines go); replaces each file atomically.

    Returns messages about lines that are damaged, which are removed, and lines that are missing. `interval` is that of
    MetricsLog.
    """
    notes = []
    for name in (METRICS, SAMPLES, ROLLOUTS):
        path = output / name
        if not path.exists():
            if name == ROLLOUTS:
                continue
            notes += [f"{name} is missing: what it held of earlier updates is lost"] if step else []
            continue
        lines, damaged = _read_lines(path)
        current = [line for line in lines if step is not None and line.row["step"] <= step]
        if damaged and step is not None:
            notes.append(f"{name} is damaged: {damaged} of its lines are not what was written, and are left out")
        elif step and name == METRICS and (last := _last_update(current)) + interval <= step:
            notes.append(f"{name} is damaged: it ends at update {last}, and the checkpoint is of update {step}")
        draft = path.with_suffix(".partial")
        draft.write_bytes(b"".join(line.content for line in current))
        os.replace(draft, path)
    return notes


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of the file, and its JSON object without the checksum."""

    content: bytes
    row: dict[str, Any]


def _read_lines(path: pathlib.Path) -> tuple[list[_Line], int]:
    """The undamaged lines of a file, and the number of damaged ones. An incomplete last line is none of either."""
    if not path.exists():
        return [], 0
    contents = path.read_bytes().split(b"\n")[:-1]
    rows = [(content + b"\n", parse_line(content + b"\n")) for content in contents]
    lines = [_Line(content, row) for content, row in rows if row is not None]
    return lines, len(rows) - len(lines)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line with its end, without its checksum; None if the line is damaged."""
    checked = _CHECKED.fullmatch(line)
    if checked and zlib.crc32(checked[1]) != int(checked[2]):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if checked:
        return {key: value for key, value in row.items() if key != CHECKSUM} if isinstance(row, dict) else None
    return row if isinstance(row, dict) and row and list(row)[-1] in LAST_COLUMNS else None


def _last_update(lines: list[_Line]) -> int:
    return max((line.row["step"] for line in lines if line.row.get("kind") == "train"), default=0)


def format_line(row: Mapping[str, object]) -> str:
    """A line of JSON that ends with the checksum of the rest."""
    content = json.dumps(row, ensure_ascii=False)[:-1]
    return f'{content}, "{CHECKSUM}": {zlib.crc32(content.encode())}}}\n'


Reading = dict[str, float]


class DeviceMetrics:
    """Reads this process's devices; keys are prefixed by the local device index, as in `device0_memory`.

    `memory` and `peak_memory` are bytes, `utilization` percent, `power` watts, `temperature` degrees Celsius.
    """

    def __init__(self, env: Mapping[str, str] = os.environ):
        self._devices = jax.local_devices()
        self._gpus: list[Callable[[], Reading]] = []
        if self._devices[0].platform in ("gpu", "cuda", "rocm"):
            readers = _nvidia() or _amd()
            self._gpus = [readers[number] for number in physical(self._devices, env) if number < len(readers)]

    def read(self) -> Reading:
        """Returns the current figures; empty on CPUs, which report none."""
        figures: Reading = {}
        for number, device in enumerate(self._devices):
            stats = device.memory_stats() or {}
            for name, key in (("memory", "bytes_in_use"), ("peak_memory", "peak_bytes_in_use")):
                if key in stats:
                    figures[f"device{number}_{name}"] = float(stats[key])
        for number, gpu in enumerate(self._gpus):
            figures |= {f"device{number}_{name}": value for name, value in gpu().items()}
        return figures


def physical(devices: Sequence[jax.Device], env: Mapping[str, str] = os.environ) -> list[int]:
    """Returns the driver's indices of `devices`: drivers count all devices of a machine, JAX the visible ones."""
    shown = next((env[name] for name in VISIBLE_DEVICE_VARIABLES if name in env), "")
    numbers = [int(word) for word in shown.split(",") if word.strip().isdigit()]
    reported = [getattr(device, "local_hardware_id", None) for device in devices]
    local_ids = [index if number is None else number for index, number in enumerate(reported)]
    return [numbers[number] if number < len(numbers) else number for number in local_ids]


def _nvidia() -> list[Callable[[], Reading]]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []

    def reader(handle: Any) -> Callable[[], Reading]:
        def read() -> Reading:
            figures: Reading = {}
            with contextlib.suppress(nvml.NVMLError):  # not every card reports every figure
                figures["utilization"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            with contextlib.suppress(nvml.NVMLError):
                figures["power"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            with contextlib.suppress(nvml.NVMLError):
                figures["temperature"] = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            return figures

        return read

    return [reader(handle) for handle in handles]


def _amd() -> list[Callable[[], Reading]]:
    try:
        smi = importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError):  # importing amdsmi locates its library by a variable
        return []
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException:
        return []

    def reader(handle: Any) -> Callable[[], Reading]:
        def read() -> Reading:
            figures: Reading = {}
            with contextlib.suppress(smi.AmdSmiException):
                figures |= _number("utilization", smi.amdsmi_get_gpu_activity(handle).get("gfx_activity"))
            with contextlib.suppress(smi.AmdSmiException):
                power = smi.amdsmi_get_power_info(handle)
                current = _number("power", power.get("current_socket_power"))
                figures |= current or _number("power", power.get("average_socket_power"))
            with contextlib.suppress(smi.AmdSmiException):
                sensor, metric = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
                figures |= _number("temperature", smi.amdsmi_get_temp_metric(handle, sensor, metric))
            return figures

        return read

    return [reader(handle) for handle in handles]


def _number(name: str, value: Any) -> Reading:
    """Returns {name: value}, or {} for the 'N/A' of figures that a card does not report."""
    return {name: float(value)} if isinstance(value, int | float) else {}
