"""Renders what serving takes: memory on each device, and a line for each number of rows."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshtune import terminal
from meshtune.costs.roofline import EFFICIENCY
from meshtune.plan.serving import ServePlan
from meshtune.setup.memory import size_in_words


def print_serve_plan(plan: ServePlan, console: Console | None = None) -> None:
    """Prints a plan."""
    split = "" if plan.tp == 1 else f" on each of {plan.tp} devices"
    row, working = size_in_words(plan.cache_row), size_in_words(plan.step_row)
    memory = Text(
        f"weights {size_in_words(plan.weights)}, cache of a row of {plan.length:,} tokens {row}, and {working} for its "
        f"step{split}; {plan.most_rows:,} rows fit"
    )
    table = Table("rows", "fits", "read a step", "tokens/s at most", "expected", "limited by", box=None)
    for step in plan.steps:
        limit = "memory" if step.memory_seconds >= step.compute_seconds else "arithmetic"
        read = size_in_words(step.weight_bytes + step.cache_bytes)
        speeds = f"{step.bound:,.0f}", f"{step.expected:,.0f}"
        table.add_row(str(step.rows), "yes" if step.fits else "no", read, *speeds, limit)
    shares = f"{EFFICIENCY['memory']:.0%} of the bandwidth and {EFFICIENCY['compute']:.0%} of the arithmetic"
    note = f"cache: {plan.cache}; expected: {shares} that data sheets give; messages between devices are not counted"
    parts = Group(memory, Text(""), table, Text(""), Text(note, style="dim"))
    title = f"[bold]serving on {plan.target}[/]"
    (console or terminal.console()).print(Panel(parts, title=title, title_align="left", padding=(1, 2)))
