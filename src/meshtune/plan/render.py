"""Renders a plan in the terminal: verdict, memory by role, time, cost, and the changes to make."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshtune import terminal
from meshtune.costs.decoding import RolloutCost
from meshtune.costs.hardware import Target
from meshtune.costs.reliability import Reliability
from meshtune.costs.roofline import EFFICIENCY
from meshtune.mesh.config import MeshConfig
from meshtune.plan.report import PlanReport, StepPlan
from meshtune.setup.memory import size_in_words
from meshtune.setup.search import override_arguments

COLORS = {
    "weights": "blue",
    "adapters": "cyan",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "output": "white",
}
RESOURCES = {
    "compute": "arithmetic",
    "memory": "device memory",
    "link": "inside a host",
    "network": "between hosts",
    "host": "to host memory",
}
WIDTH = 60  # characters of the memory bar


def print_report(report: PlanReport, arguments: Sequence[str], console: Console | None = None) -> None:
    """Prints a report. `arguments` are the recipe and overrides on the command line, for the command to run."""
    console = console or terminal.console()
    best = report.best
    parts: list[RenderableType] = [_verdict(report), _bar(best, report), _roles(best, report)]
    if report.remedies:
        parts.append(_remedies(report))
    parts += [_roofline(best), _times(report)]
    if report.reliability is not None:
        parts.append(_reliability(report.reliability, report.target))
    if report.coverage:
        parts.append(_coverage(report))
    if report.table:
        parts.append(_candidates(report))
    parts.append(_next_command(report, arguments))
    parts += [Text(note, style="dim") for note in _notes(report)]
    console.print(Panel(Group(*parts), title=f"[bold]{report.target}[/]", title_align="left", padding=(1, 2)))


def format_duration(seconds: float) -> str:
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


def _verdict(report: PlanReport) -> Text:
    best = report.best
    source = "the compiler's figures" if best.compiled else "an estimate without a compiler"
    if report.as_given.fits:
        head = ("It fits", "bold green")
    elif report.remedied is not None:
        head = ("It fits with the changes below", "bold yellow")
    else:
        head = ("It does not fit", "bold red")
    free = best.memory_limit - best.device_bytes
    margin = f"{size_in_words(free)} to spare" if free >= 0 else f"{size_in_words(-free)} too much"
    reserve = f"a reserve of {100 * report.reserve:.0f}% of the memory"
    text = Text.assemble(head, f": {size_in_words(best.device_bytes)} of ")
    text.append(f"{size_in_words(report.target.device.memory)} per device, {margin} with {reserve}")
    return text.append(f" ({source})", style="dim" if best.compiled else "bold yellow")


def _bar(best: StepPlan, report: PlanReport) -> Text:
    """The memory of a device as a bar with a colour for each role, the free part and the reserve."""
    capacity = max(report.target.device.memory, best.device_bytes)
    text, drawn = Text("\n"), 0
    for role, size in best.breakdown.items():
        cells = round(WIDTH * size / capacity)
        text.append("█" * cells, style=COLORS[role])
        drawn += cells
    free = max(0, WIDTH - drawn)
    reserved = min(free, round(WIDTH * max(0, report.target.device.memory - best.memory_limit) / capacity))
    text.append("░" * (free - reserved), style="dim").append("▒" * reserved, style="dim red")
    return text


def _roles(best: StepPlan, report: PlanReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    labels = {"activations": "activations and temporaries"}
    for role, size in best.breakdown.items():
        if size:
            share = f"{100 * size / best.update_bytes:.0f}%"
            table.add_row(
                Text("■ ", style=COLORS[role]).append(labels.get(role, role), "default"), size_in_words(size), share
            )
    rollout = best.rollout
    if rollout is not None:
        parts = f"weights and optimizer {size_in_words(rollout.resident)}, caches of {rollout.rows} rows "
        parts += f"of {rollout.slots:,} tokens {size_in_words(rollout.caches)}"
        table.add_row("update", size_in_words(best.update_bytes), "the sum of these")
        table.add_row("rollout", size_in_words(rollout.device_bytes), parts)
    table.add_row(Text("per device", style="bold"), Text(size_in_words(best.device_bytes), style="bold"), "")
    if best.host:
        parts = ", ".join(f"{role} {size_in_words(size)}" for role, size in best.host.items())
        per_host = size_in_words(best.host_bytes * report.target.per_host)
        table.add_row("host memory", size_in_words(best.host_bytes), f"per device ({parts}); {per_host} per host")
    return table


def _reliability(run: Reliability, target: Target) -> Table:
    table = Table(title=f"\n{format_duration(run.seconds)} on {target}", title_justify="left", box=None, padding=(0, 2))
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    table.add_row("failures", f"{run.failures:.3g}", f"one in {format_duration(run.mtbf)}")
    kept_waiting = (
        f"updates wait {format_duration(run.save_seconds)}, writing takes {format_duration(run.write_seconds)}"
    )
    table.add_row("a save", size_in_words(run.save_bytes), kept_waiting)
    table.add_row("a restart reads", size_in_words(run.restart_bytes), f"{format_duration(run.restart_seconds)} in all")
    table.add_row("best between saves", format_duration(run.interval), "checkpoint.every")
    ten = f"{100 * run.default_goodput:.1f}% with ten saves a run"
    table.add_row(
        "goodput", f"{100 * run.goodput:.1f}%", f"of the time is in updates that are kept; {ten}", style="bold"
    )
    for number, limit in enumerate(run.limits[:3]):
        verdict = "breaks" if limit.load > 1 else "holds"
        table.add_row(
            f"{'first, ' if not number else ''}{limit.name}", f"{100 * limit.load:.3g}%", f"{verdict}: {limit.text}"
        )
    return table


def _roofline(best: StepPlan) -> Table:
    times = best.roofline
    table = Table(title="\nroofline of an update", title_justify="left", box=None, padding=(0, 2))
    table.add_column("")
    for heading in ("at the data sheet's rate", "efficiency", "expected"):
        table.add_column(heading, justify="right")
    efficiencies = {"compute": "compute", "memory": "memory", "link": "links", "network": "links", "host": "host"}
    for name, seconds in times.achievable.items():
        if seconds:
            style = "bold" if name == times.bound_by else ""
            share = f"{100 * EFFICIENCY[efficiencies[name]]:.0f}%"
            bound = format_duration(getattr(times, name))
            table.add_row(RESOURCES[name], bound, share, format_duration(seconds), style=style)
    return table


def _times(report: PlanReport) -> Table:
    best, times = report.best, report.best.roofline
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    candidate = best.predicted.candidate
    micro = f" in {candidate.accumulation} micro-batches" if candidate.accumulation > 1 else ""
    rows = candidate.rows * candidate.accumulation
    batch = f"{rows} x {candidate.length} tokens per update{micro}"
    table.add_row("\nmesh", f"\n{best.predicted.mesh}, {batch}, remat {candidate.remat}")
    exposed = 100 * times.exposed / times.seconds
    waiting = f", {exposed:.0f}% of it waiting for transfers" if exposed > 1 else ""
    name = "an update" if best.rollout is None else "update"
    table.add_row(name, f"{format_duration(times.seconds)}, bound by {RESOURCES[times.bound_by]}{waiting}")
    if best.rollout is not None:
        for label, text in _rollout_times(best.rollout, candidate.accumulation):
            table.add_row(label, text)
    per_device = times.tokens_per_second / report.target.devices
    table.add_row("tokens per second", f"{times.tokens_per_second:,.0f} ({per_device:,.0f} per device)")
    table.add_row("MFU", f"{100 * times.mfu:.0f}% expected, {100 * times.mfu_bound:.0f}% at most")
    updates = report.updates
    if report.run_seconds is not None:
        duration = format_duration(report.run_seconds)
        table.add_row("the whole recipe", f"{duration} for {updates.count:,.0f} updates ({updates.source})")
    else:
        table.add_row("the whole recipe", f"[dim]{updates.source}: give train.steps or --tokens[/]")
    if report.cost is not None:
        table.add_row("cost", f"{report.cost:,.2f} at {report.price:g} per hour of each device")
    if best.compiled is not None:
        cached = ", cached by an earlier call" if best.compiled.cached else ""
        seconds = best.compiled.lower_seconds + best.compiled.compile_seconds
        table.add_row("compiled", f"in {seconds:.0f} s by {best.compiled.compiler}{cached}")
    return table


def _rollout_times(rollout: RolloutCost, micro_batches: int) -> list[tuple[str, str]]:
    lengths, parts = rollout.lengths, [("reading prompts", rollout.reading), ("decoding", rollout.decoding)]
    parts += [("scoring", rollout.scoring)] if rollout.scoring else []
    seconds = ", ".join(f"{part} {format_duration(time)}" for part, time in parts)
    shared = f", for {rollout.updates} updates" if rollout.updates > 1 else ""
    sizes = f"{rollout.completions} completions of {lengths.completion:,.0f} tokens after {lengths.prompt:,.0f}"
    filled = f"{rollout.micro_batches} of {micro_batches} micro-batches hold something"
    speed = f"{rollout.tokens_per_second:,.0f} tokens a second while decoding"
    return [
        ("rollout", f"{format_duration(rollout.seconds)}{shared}: {seconds}; {speed}"),
        ("", f"{sizes} ({lengths.source}), {rollout.rows} at once; {filled}"),
    ]


def _coverage(report: PlanReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for choice in report.coverage:
        table.add_row(
            Text(choice.name, style=choice.style), Text.assemble(choice.value, (f" ({choice.reason})", "dim"))
        )
    return table


def _remedies(report: PlanReport) -> Table:
    title = "\nremedies, each on top of those before it (estimated)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for heading in ("", "remedy", "costs", "per device", ""):
        table.add_column(heading, justify="right" if heading == "per device" else "left", overflow="fold")
    for remedy in report.remedies:
        if remedy.predicted is None:
            table.add_row("-", remedy.name, remedy.cost, "", remedy.refusal, style="dim")
        elif remedy.redundant:
            table.add_row("", remedy.name, remedy.cost, "", "not needed in the end", style="dim")
        else:
            mark = "[green]fits[/]" if remedy.fits else "[red]no[/]"
            size = size_in_words(remedy.predicted.device_bytes)
            table.add_row(mark, remedy.name, remedy.cost, size, "")
    return table


def _candidates(report: PlanReport) -> Table:
    title = f"\n{report.candidates} candidates, the best {len(report.table)}; * compiled, the others estimated"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    numeric = ("memory", "update", "tokens/s", "MFU")
    for heading in ("", "mesh", "rows", "remat", "host, base", *numeric):
        wraps = heading in ("mesh", "host, base")
        table.add_column(heading, justify="right" if heading in numeric else "left", no_wrap=not wraps)
    for rank, plan in enumerate(report.table, 1):
        candidate, times = plan.predicted.candidate, plan.roofline
        base = plan.predicted.overrides.get("quantize")
        table.add_row(
            (str(rank) if plan.fits else "[red]-[/]") + ("[green]*[/]" if plan.compiled else ""),
            str(MeshConfig(**plan.predicted.mesh.sizes)),
            str(candidate.rows),
            candidate.remat,
            ", ".join([*candidate.offload, *([str(base)] if base else [])]),
            size_in_words(plan.device_bytes),
            format_duration(plan.seconds),
            f"{times.tokens_per_second:,.0f}",
            f"{100 * times.mfu:.0f}%",
            style="" if plan.fits else "dim",
        )
    return table


def _next_command(report: PlanReport, arguments: Sequence[str]) -> Text:
    best = report.best
    if best.fits:
        command = " ".join(["meshtune train", *arguments, *override_arguments(best.predicted.shown_overrides)])
        return Text.assemble(("\nrun it with  ", "bold"), (command, "cyan"))
    if report.smallest is not None:
        return Text.assemble(("\nthe smallest machine that would hold it  ", "bold"), (str(report.smallest), "cyan"))
    return Text("\nno described machine would hold it: use shorter rows or a smaller model")


def _notes(report: PlanReport) -> list[str]:
    if report.best.compiled is not None:
        return [f"\n{note}" for note in report.best.compiled.notes]
    return [f"\nestimated, not compiled: {report.reason}" if report.reason else "\nestimated, not compiled"]
