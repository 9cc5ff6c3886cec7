"""The results of run.py as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

WARM_UP = 2  # updates that are not timed
GIB = 2**30


def table(values: dict[str, Any]) -> str:
    """Everything measured so far, a table for each stage."""
    machine = values.get("machine", {})
    lines = ["# Measured on one accelerator", ""]
    lines += [f"{'; '.join(machine.get('devices', []))}; Python {machine.get('python')}; {machine.get('date')}", ""]
    for stage, (title, head, cells) in STAGES.items():
        chosen = {
            name.partition(": ")[2]: result
            for name, result in values.get("measurements", {}).items()
            if name.startswith(f"{stage}: ") or (stage == 5 and "predicted" in result)
        }
        if not chosen:
            continue
        lines += [f"## {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
        for name, result in chosen.items():
            row = _failed(result, len(head)) if "failed" in result else cells(result)
            lines.append(f"| {' | '.join([name, *row])} |")
        lines.append("")
    return "\n".join(lines)


def seconds_per_update(result: dict[str, Any]) -> float:
    """The median of the updates after the first ones."""
    return statistics.median(result["seconds"][WARM_UP:] or result["seconds"])


def _failed(result: dict[str, Any], columns: int) -> list[str]:
    reason = result["failed"].strip().splitlines()[-1][:100].replace("|", "/")
    return [f"failed: {reason}", *[""] * (columns - 2)]


def _tests(result: dict[str, Any]) -> list[str]:
    failures = "; ".join(result["failures"][:3]) or "-"
    return [*(str(result[key]) for key in ("passed", "failed_tests", "skipped")), failures.replace("|", "/")]


def _kernels(result: dict[str, Any]) -> list[str]:
    shape = next(iter(result["shapes"].values()))
    errors = ", ".join(f"{backend} {error:.1e}" for backend, error in shape["errors"].items())
    times = ", ".join(
        f"{name} {time['ms']:.2f} ms ({time['tflops']:.0f} TFLOP/s)" for name, time in shape["times"].items()
    )
    return [errors, times]


def _updates(result: dict[str, Any]) -> list[str]:
    seconds = seconds_per_update(result)
    speed = f"{result['tokens'] / seconds:,.0f}"
    return [f"{seconds:.3f} s", speed, f"{result['flops'] / seconds / 1e12:.1f}", _size(result["peak_bytes"])]


def _decoding(result: dict[str, Any]) -> list[str]:
    first = f"{result['first_token_seconds']:.3f} s"
    return [first, f"{result['tokens_per_second']:,.1f}", _size(result["peak_bytes"])]


def _predicted(result: dict[str, Any]) -> list[str]:
    predicted, seconds = result["predicted"], seconds_per_update(result)
    expected = predicted["step_seconds"]
    return [
        *(_size(size) for size in (predicted["device_bytes"], result["peak_bytes"])),
        "-" if expected is None else f"{expected:.3f} s",
        f"{seconds:.3f} s",
    ]


def _size(size: int | None) -> str:
    return "not known" if size is None else f"{size / GIB:.2f} GiB"


STAGES: dict[int, tuple[str, list[str], Callable[[dict[str, Any]], list[str]]]] = {
    1: ("Numbers", ["tests", "passed", "failed", "skipped", "failures"], _tests),
    2: ("Kernels", ["shape", "largest error, of the largest value", "times"], _kernels),
    3: (
        "LoRA and QLoRA",
        ["side", "an update", "tokens/s", "model TFLOP/s", "peak memory"],
        _updates,
    ),
    4: ("Decoding", ["side", "first token", "tokens/s after it", "peak memory"], _decoding),
    5: (
        "What plan says",
        ["case", "memory predicted", "memory measured", "an update predicted", "an update measured"],
        _predicted,
    ),
}
