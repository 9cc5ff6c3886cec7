"""A plan in the terminal: the verdict, memory, time, money, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshtune.mesh.axes import MeshConfig
from meshtune.plan.report import Answer, Report
from meshtune.plan.roofline import REACHED
from meshtune.setup.memory import size_in_words

COLORS = {
    "weights": "blue",
    "adapters": "cyan",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "output": "white",
}
SPEEDS = {
    "compute": "arithmetic",
    "memory": "device memory",
    "link": "inside a host",
    "network": "between hosts",
    "host": "to host memory",
}
WIDTH = 60  # of a bar


def show(report: Report, arguments: Sequence[str], console: Console | None = None) -> None:
    """Prints a report; `arguments` are the recipe and overrides it was made of, for the command to run."""
    console = console or Console(highlight=False)
    best = report.best
    parts: list[Any] = [_verdict(report), _bar(best, report), _roles(best, report)]
    if report.knobs:
        parts.append(_knobs(report))
    parts.append(_speeds(best))
    parts.append(_times(report))
    if report.table:
        parts.append(_candidates(report))
    parts.append(_next(report, arguments))
    parts += [Text(note, style="dim") for note in _notes(report)]
    console.print(Panel(Group(*parts), title=f"[bold]{report.target}[/]", title_align="left", padding=(1, 2)))


def overrides_in_words(overrides: dict[str, Any]) -> list[str]:
    """As one writes them on a command line: `mesh.fsdp=8 compute.remat=full`."""
    words = []
    for key, value in overrides.items():
        if isinstance(value, dict):
            words += [f"{key}.{name}={one}" for name, one in value.items()]
        elif isinstance(value, list):
            words.append(f"{key}=[{','.join(map(str, value))}]")
        else:
            words.append(f"{key}={value}")
    return words


def duration(seconds: float) -> str:
    """0.0123 -> '12.3 ms', 4000 -> '1 h 7 min'."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / 1440:.1f} days"


def _verdict(report: Report) -> Text:
    best = report.best
    source = "the compiler's figures" if best.compiled else "an estimate, no compiler was asked"
    if report.answer.fits:
        head = ("It fits", "bold green")
    elif report.mended is not None:
        head = ("It fits once some knobs are turned", "bold yellow")
    else:
        head = ("It does not fit", "bold red")
    free = best.limit - best.device_bytes
    words = f"{size_in_words(free)} to spare" if free >= 0 else f"{size_in_words(-free)} too much"
    reserve = f"{100 * report.reserve:.0f}% of the memory kept in reserve"
    text = Text.assemble(head, f": {size_in_words(best.device_bytes)} of ")
    text.append(f"{size_in_words(report.target.device.memory)} a device, {words} with {reserve}")
    return text.append(f" ({source})", style="dim" if best.compiled else "bold yellow")


def _bar(best: Answer, report: Report) -> Text:
    """The memory of a device as a bar, a colour a role, with the reserve's start marked."""
    capacity = max(report.target.device.memory, best.device_bytes)
    text, drawn = Text("\n"), 0
    for role, size in best.breakdown.items():
        cells = round(WIDTH * size / capacity)
        text.append("█" * cells, style=COLORS[role])
        drawn += cells
    rest = max(0, WIDTH - drawn)
    reserved = min(rest, round(WIDTH * max(0, report.target.device.memory - best.limit) / capacity))
    text.append("░" * (rest - reserved), style="dim").append("▒" * reserved, style="dim red")
    return text


def _roles(best: Answer, report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    words = {"activations": "activations and temporaries"}
    for role, size in best.breakdown.items():
        if size:
            share = f"{100 * size / best.device_bytes:.0f}%"
            table.add_row(
                Text("■ ", style=COLORS[role]).append(words.get(role, role), "default"), size_in_words(size), share
            )
    table.add_row(Text("each device", style="bold"), Text(size_in_words(best.device_bytes), style="bold"), "")
    if best.host:
        what = ", ".join(f"{role} {size_in_words(size)}" for role, size in best.host.items())
        every = size_in_words(best.host_bytes * report.target.each)
        table.add_row("host memory", size_in_words(best.host_bytes), f"for each device ({what}); {every} a host")
    return table


def _speeds(best: Answer) -> Table:
    times = best.roofline
    table = Table(title="\nroofline of an update", title_justify="left", box=None, padding=(0, 2))
    for heading, justify in (("", "left"), ("at the data sheet", "right"), ("reached", "right"), ("likely", "right")):
        table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    shares = {"compute": "compute", "memory": "memory", "link": "links", "network": "links", "host": "host"}
    for name, seconds in times.at_reached.items():
        if seconds:
            style = "bold" if name == times.bound_by else ""
            share = f"{100 * REACHED[shares[name]]:.0f}%"
            table.add_row(SPEEDS[name], duration(getattr(times, name)), share, duration(seconds), style=style)
    return table


def _times(report: Report) -> Table:
    best, times = report.best, report.best.roofline
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    case = best.option.case
    micro = f" in {case.accumulation} micro-batches" if case.accumulation > 1 else ""
    rows = case.rows * case.accumulation
    table.add_row("\nmesh", f"\n{best.option.mesh}, {rows} x {case.length} tokens an update{micro}, remat {case.remat}")
    waiting = (
        f", {100 * times.waited / times.seconds:.0f}% of it waiting" if times.waited > 0.01 * times.seconds else ""
    )
    table.add_row("an update", f"{duration(times.seconds)}, bound by {SPEEDS[times.bound_by]}{waiting}")
    each = times.tokens_per_second / report.target.devices
    table.add_row("tokens a second", f"{times.tokens_per_second:,.0f} ({each:,.0f} a device)")
    table.add_row("MFU", f"{100 * times.mfu:.0f}% likely, {100 * times.mfu_bound:.0f}% at most")
    if report.run_seconds is not None:
        table.add_row("the whole recipe", f"{duration(report.run_seconds)} for {report.steps:,.0f} updates")
    else:
        table.add_row("the whole recipe", "[dim]its updates depend on the data: give train.steps or --tokens[/]")
    if report.cost is not None:
        table.add_row("cost", f"{report.cost:,.2f} at {report.price:g} for an hour of each device")
    if best.compiled is not None:
        cached = ", from an earlier call" if best.compiled.cached else ""
        seconds = best.compiled.lower_seconds + best.compiled.compile_seconds
        table.add_row("compiled", f"in {seconds:.0f} s by {best.compiled.compiler}{cached}")
    return table


def _knobs(report: Report) -> Table:
    table = Table(
        title="\nknobs, each on top of the ones before (estimated)", title_justify="left", box=None, padding=(0, 2)
    )
    for heading in ("", "knob", "costs", "each device", ""):
        table.add_column(heading, justify="right" if heading == "each device" else "left", overflow="fold")
    for one in report.knobs:
        if one.option is None:
            table.add_row("-", one.name, one.cost, "", one.refusal, style="dim")
            continue
        if one.superfluous:
            table.add_row("", one.name, one.cost, "", "not needed in the end", style="dim")
            continue
        mark = "[green]fits[/]" if one.fits else "[red]no[/]"
        table.add_row(mark, one.name, one.cost, size_in_words(one.option.estimate.device_bytes), "")
    return table


def _candidates(report: Report) -> Table:
    title = f"\n{report.candidates} candidates, the first {len(report.table)}; * compiled, the others estimated"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    numbers = ("memory", "update", "tokens/s", "MFU")
    for heading in ("", "mesh", "rows", "remat", "host, base", *numbers):
        wraps = heading in ("mesh", "host, base")
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=not wraps)
    for number, one in enumerate(report.table, 1):
        case, times = one.option.case, one.roofline
        base = one.option.overrides.get("quantize")
        table.add_row(
            (str(number) if one.fits else "[red]-[/]") + ("[green]*[/]" if one.compiled else ""),
            str(MeshConfig(**one.option.mesh.sizes)),
            str(case.rows),
            case.remat,
            ", ".join([*case.offload, *([str(base)] if base else [])]),
            size_in_words(one.device_bytes),
            duration(times.seconds),
            f"{times.tokens_per_second:,.0f}",
            f"{100 * times.mfu:.0f}%",
            style="" if one.fits else "dim",
        )
    return table


def _next(report: Report, arguments: Sequence[str]) -> Text:
    best = report.best
    changes = overrides_in_words(best.option.said)
    if best.fits:
        command = " ".join(["meshtune train", *arguments, *changes])
        return Text.assemble(("\nrun it with  ", "bold"), (command, "cyan"))
    if report.smallest is not None:
        return Text.assemble(("\nthe smallest machine that would hold it  ", "bold"), (str(report.smallest), "cyan"))
    return Text("\nno machine that is described here would hold it: use shorter rows or a smaller model")


def _notes(report: Report) -> list[str]:
    best = report.best
    notes = []
    if best.compiled is None:
        notes.append(f"\nestimated, not compiled: {report.reason}" if report.reason else "\nestimated, not compiled")
    else:
        notes += [f"\n{note}" for note in best.compiled.notes]
    return notes
