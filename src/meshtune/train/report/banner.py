"""Prints a run's plan and resolved settings before training, and its summary after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshtune.adapters.method import ParameterCounts
from meshtune.errors import amount
from meshtune.runs.output import CONSOLE_LOG
from meshtune.setup.choices import Decision
from meshtune.setup.memory import size_in_words
from meshtune.train.report.page import REPORT
from meshtune.train.result.result import Result

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
