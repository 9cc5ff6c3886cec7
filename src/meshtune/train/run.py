"""Trains by a recipe: sets the run up, loads or resumes, runs the loop, and exports the result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from meshtune import terminal
from meshtune.config.recipe import Recipe
from meshtune.digests import DamagedError, read_digests
from meshtune.errors import UserError, amount
from meshtune.hooks import SECTIONS, SectionHooks
from meshtune.lazy import LazyFunction
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.objectives.stages import STAGES
from meshtune.runs.output import (
    CHECKPOINTS,
    RESULT_DIGEST,
    check_output,
    claim_output,
    read_run,
    write_recipe,
    write_run,
)
from meshtune.setup.choices import checked_attention
from meshtune.setup.shortage import MemoryShortage, as_shortage, explain_shortage, ran_out
from meshtune.train.assemble import LoadedRun, load_run
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record, disk_reason
from meshtune.train.checkpoint.resume import COMMANDS, Resumed, find_resume
from meshtune.train.loop import Ended, Task, interruptible, run_loop
from meshtune.train.report import banner, events, metrics_log, page
from meshtune.train.report.attempts import AttemptsLog, read_goodput
from meshtune.train.report.events import Sink, open_sinks
from meshtune.train.report.plot import LossPlot, SmoothedLoss
from meshtune.train.report.progress import ConsoleLog, ProgressBar, log_console
from meshtune.train.result.final import Result, export_result
from meshtune.train.run_setup import (
    CompiledShortage,
    PreparedRun,
    runtime_fix,
    set_up_run,
    smaller_micro_batches,
    with_base,
    with_micro_batch,
)
from meshtune.train.task import make_task

if TYPE_CHECKING:
    from meshtune.train.checkpoint.copies import CheckpointCopies

open_copies = LazyFunction("meshtune.train.checkpoint.copies:CheckpointCopies")
Reference = LazyFunction("meshtune.train.evaluation.reference:Reference")


def train(recipe: Recipe, *, console: Console | None = None, job: Job | None = None) -> Result:
    """Runs a recipe, or resumes it (`recipe.resume`), and leaves everything in `recipe.output`.

    `job` are the processes that share the work (mesh.processes.start); all of them call this. Process 0 shows and
    writes everything that is not split.

    Raises: UserError for any error of recipe, data, model, disk or numbers. Ctrl-C and SIGTERM end the run
    after the update under way, saved, with `Result.interrupted` set.
    """
    job = job or Job(ProcessInfo())
    console = console or terminal.console(quiet=not job.is_main_process)
    output = pathlib.Path(recipe.output).expanduser()
    hooks = hooks_of(recipe)
    for hook in hooks:
        if hook.check is not None:
            hook.check(recipe, job)
    try:
        with log_console(console) as log:
            result = _run(recipe, output, console, log, job)
    except OSError as error:
        if _is_deleted(output, error):
            raise UserError(
                "the run's folder is gone: it was moved or deleted while the run went on",
                where=str(output),
                fix="start the run anew, or put the folder back and go on from what was saved with resume=true",
            ) from error
        if not (reason := disk_reason(error)):
            raise
        raise UserError(
            f"the run cannot write: {reason}",
            where=str(error.filename or output),
            fix="make room or make it writable; then the same command with resume=true goes on from what was saved",
        ) from error
    if result.interrupted is None:
        for hook in hooks:
            if hook.finish is not None:
                hook.finish(recipe, console, job)
    return result


def hooks_of(recipe: Recipe) -> list[SectionHooks]:
    """Returns the hooks of the sections that a recipe has."""
    return [hooks for section, hooks in SECTIONS.items() if getattr(recipe, section) is not None]


def _is_deleted(output: pathlib.Path, error: OSError) -> bool:
    """Whether a file could not be opened because the folder of the run is not there any more."""
    if not isinstance(error, FileNotFoundError) or error.filename is None or output.is_dir():
        return False
    return pathlib.Path(os.fsdecode(error.filename)).absolute().is_relative_to(output.absolute())


def _run(recipe: Recipe, output: pathlib.Path, console: Console, log: ConsoleLog, job: Job) -> Result:
    copies = _open_copies(recipe, output, console, job)
    run = set_up_run(recipe, output, console, log, job)
    keep, by_replica = run.recipe.checkpoint.keep, run.recipe.model.load == "replica"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_claim_output(run))
        opened = Checkpoints(output / CHECKPOINTS, keep=keep, job=job, by_replica=by_replica)
        checkpoints = stack.enter_context(opened)
        if copies is not None:
            stack.enter_context(copies)
        run = with_base(run)
        while True:
            with (
                explain_shortage(lambda run=run: runtime_fix(run, checkpoints.latest())),
                _way_to_go_on(run, checkpoints),
            ):
                result = _train_or_shrink(run, checkpoints, copies)
            if isinstance(result, Result):
                return result
            run = result
            gc.collect()  # the weights of the attempt before


@contextlib.contextmanager
def _way_to_go_on(run: PreparedRun, checkpoints: Checkpoints) -> Iterator[None]:
    """Prints how to continue a run that a second Ctrl-C ended at once."""
    try:
        yield
    except KeyboardInterrupt:
        saved = checkpoints.latest()
        if saved is None:
            run.console.print("[bold]ended at once[/], before anything was saved")
        else:
            _say_how_to_go_on(run, f"[bold]ended at once[/]; saved is update {saved} of {run.total_steps}")
        raise


def _say_how_to_go_on(run: PreparedRun, status: str) -> None:
    run.console.print(f"{status}; to go on:")
    line = terminal.command("train", f"{run.output}/recipe.yaml", "--resume")
    run.console.print(f"  {line}", markup=False, soft_wrap=True)


def _open_copies(recipe: Recipe, output: pathlib.Path, console: Console, job: Job) -> CheckpointCopies | None:
    """Returns the copies of the checkpoints, on process 0; a run that resumes first fetches those that it lacks."""
    url = recipe.checkpoint.copy_to
    if url is None or not job.is_main_process:
        return None
    check_output(output, resume=recipe.resume, overwrite=recipe.overwrite)
    notify = functools.partial(console.print, style="yellow", markup=False, highlight=False, soft_wrap=True)
    copies = open_copies(url, output, keep=recipe.checkpoint.keep, notify=notify)
    copies.check(resume=recipe.resume)
    if recipe.resume and not recipe.overwrite:
        with claim_output(output, overwrite=False), console.status(f"fetching checkpoints from {url}"):
            steps = copies.fetch()
        if steps:
            console.print(f"fetched from {url}: {', '.join(f'update {step}' for step in steps)}", soft_wrap=True)
    return copies


def _train_or_shrink(
    run: PreparedRun, checkpoints: Checkpoints, copies: CheckpointCopies | None
) -> Result | PreparedRun:
    """The result or, where a micro-batch that was left open did not fit, the run with a smaller one.

    Of several processes one alone may run out while it computes: then all end. With a checkpoint the run can go on.
    """
    try:
        return _train(run, checkpoints, copies)
    except (RuntimeError, MemoryError, MemoryShortage) as error:
        agreed = isinstance(error, CompiledShortage)
        if not ran_out(error) or not run.halves or (not agreed and run.job.process_count > 1):
            raise
        rows = error.rows if isinstance(error, CompiledShortage) else next(iter(smaller_micro_batches(run)), None)
        if rows is None or checkpoints.latest() is not None:
            raise
        problem = error.what if isinstance(error, MemoryShortage) else as_shortage(error, "").what
    run.console.print(f"[yellow]{problem}: trying a micro-batch of {amount(rows, 'row')}[/]", highlight=False)
    return with_micro_batch(run, rows)


@contextlib.contextmanager
def _claim_output(run: PreparedRun) -> Iterator[None]:
    """Holds the output directory for this job, on process 0 for all, and opens the log of the console in it."""
    if not run.job.is_main_process:
        run.job.barrier("output")
        yield
        return
    with claim_output(run.output, overwrite=run.recipe.overwrite) as aside:
        if aside is not None:
            run.console.print(f"the old run is now in {aside}", soft_wrap=True)
        run.log.open(run.output)
        run.job.barrier("output")
        yield


def _train(run: PreparedRun, checkpoints: Checkpoints, copies: CheckpointCopies | None) -> Result:
    console = run.console
    hooks = hooks_of(run.recipe)
    for hook in hooks:
        if hook.start is not None:
            hook.start(run)
    record = run.record()
    resumed = find_resume(checkpoints, record) if run.recipe.resume else None
    _show_resume(run, resumed)
    reference = Reference(run) if STAGES[run.recipe.stage.kind].needs_reference else None
    if reference is not None:
        reference.from_model()
    loaded, state = load_run(run)
    if reference is not None:
        reference.from_start(loaded.model.parameters, loaded.model.spec)
    if resumed is not None:
        if copies is not None and resumed.step not in copies.steps():
            copies.copy(resumed.step)
        state = checkpoints.restore(resumed.step, state)
        saved = {name: getattr(resumed, name) for name in ("step", "best", "stale", "kl_coef")}
        record = dataclasses.replace(record, **saved)
    banner.show_plan(console, run.plan(loaded.model, state, loaded.frozen), run.decisions)
    if record.step < run.total_steps:
        checkpoints.check_room(state)
    if run.job.is_main_process:
        step, interval = resumed.step if resumed else None, run.recipe.log.every
        for note in metrics_log.cut_back(run.output, step, interval=interval):
            console.print(f"[yellow]{note}[/]", highlight=False)
        write_recipe(run.output, run.fields | dict.fromkeys(COMMANDS, False))
    _write_run(run, _facts(run, record, "running"))
    # Nothing is trained with kernels whose numbers are wrong on this kind of device.
    for line in checked_attention(run.compute, run.spec, run.rows, run.data.train.row_length):
        console.print(line)
    task = make_task(loaded, record, state)
    savers = [hook.on_save(loaded) for hook in hooks if hook.on_save is not None]
    task = dataclasses.replace(task, saved=[saver.saved for saver in savers])
    probes = _step_probes(run, task)
    history = metrics_log.read(run.output / metrics_log.METRICS) if run.job.is_main_process else []
    loss = SmoothedLoss(run.total_steps, [row["loss"] for row in history if row["kind"] == "train"])
    with interruptible() as interrupt:
        sinks = [*_sinks(run, record.step, history, loss), *probes, *([] if copies is None else [copies])]
        with open_sinks(sinks) as events:
            ended = run_loop(task, state, checkpoints, events, interrupt)
        checkpoints.wait()
    for saver in savers:
        saver.close()
    for line in banner.summary_lines(probes, lambda fields: _write_run(run, fields)):
        console.print(line)
    if run.job.is_main_process and (goodput := read_goodput(run.output)).attempts > 1:
        console.print(f"[bold]goodput[/] {goodput}")
    if ended.interrupted is not None and ended.step < run.total_steps:
        result = _stop(run, ended, loss)
    else:
        result = _finish(loaded, ended, checkpoints, record, task, loss)
    if copies is not None:
        with console.status("copying the last checkpoint"):
            copies.wait()
    return result


def _show_resume(run: PreparedRun, resumed: Resumed | None) -> None:
    console = run.console
    if run.recipe.resume and resumed is None:
        console.print(
            f"nothing to resume: {run.output} holds no checkpoint, so the run starts from the first update",
            soft_wrap=True,
        )
    if resumed is None:
        return
    console.print(f"[bold]resuming[/] after update {resumed.step}")
    for note in resumed.notes:
        console.print(f"[yellow]{note}[/]", highlight=False)
    try:
        read_run(run.output)
    except DamagedError as error:
        console.print(f"[yellow]{error.what}; it is written again[/]", highlight=False)


def _step_probes(run: PreparedRun, task: Task) -> list[banner.StepProbe]:
    """Returns the probes that compare the step with its prediction, on process 0."""
    if not run.job.is_main_process:
        return []
    length = run.data.train.row_length
    return banner.step_probes(task.step, run.recipe, run.target, run.layout, length)


def _sinks(run: PreparedRun, start: int, history: Sequence[Mapping[str, object]], loss: SmoothedLoss) -> list[Sink]:
    log, output = run.recipe.log, run.output
    if not run.job.is_main_process:
        return [metrics_log.ProcessLog(output, run.job.process_index, interval=log.every)]
    stage = STAGES[run.recipe.stage.kind]
    plot = LossPlot(
        output,
        loss,
        interval=log.plot_every,
        title=f"{run.source.name}, {stage.title}, {run.recipe.method.kind}",
        unit=stage.unit,
        history=history,
    )
    has_target = getattr(run.recipe.stage, "kl_target", None) is not None
    headline = stage.headline + (("kl", "KL"), ("kl_coef", "KL coefficient")) * has_target
    progress = ProgressBar(run.console, loss, run.log, headline=headline)
    sinks: list[Sink] = [loss, progress, metrics_log.MetricsLog(output, interval=log.every), plot]
    sinks.append(AttemptsLog(output, time.time() - (time.monotonic() - run.started)))
    return sinks + [events.TRACKERS[name](output, log.project, run.fields, start) for name in log.trackers]


def _facts(run: PreparedRun, record: Record, status: str) -> dict[str, object]:
    """Returns the fields of run.json that every run has, however it ends."""
    base = {name: value for name, value in dataclasses.asdict(run.base).items() if value is not None}
    report = run.data.report
    trained_on = {
        "samples": report.samples,
        "noun": report.noun,
        "left_out": report.samples_left_out,
        "tokens": report.counts.tokens,
        "trained_tokens": report.counts.trained_tokens,
    }
    facts: dict[str, object] = {
        "status": status,
        "platform": run.machine.platform,
        "ends": list(run.ends),
        "total": run.total_steps,
        RESULT_DIGEST: None,
        "versions": record.versions,
        "base": base,
    }
    return facts | {"data": record.data, "trained_on": trained_on}


def _write_run(run: PreparedRun, fields: Mapping[str, object]) -> None:
    if run.job.is_main_process:
        write_run(run.output, fields)


def _write_report(run: PreparedRun) -> None:
    if run.job.is_main_process:
        page.write_report(run.output)


def _stop(run: PreparedRun, ended: Ended, loss: SmoothedLoss) -> Result:
    _write_run(run, {"status": "interrupted", "step": ended.step})
    _write_report(run)
    _say_how_to_go_on(run, f"[bold]saved[/] after update {ended.step} of {run.total_steps}")
    return _result(run, ended, loss, None, ended.interrupted)


def _is_result_best(recipe: Recipe) -> bool:
    """Whether the result is the state with the lowest validation loss, and not the last."""
    by_default = recipe.eval.early_stopping is not None and recipe.checkpoint.keep_best
    return by_default if recipe.checkpoint.result is None else recipe.checkpoint.result == "best"


def _finish(
    run: LoadedRun,
    ended: Ended,
    checkpoints: Checkpoints,
    record: Record,
    task: Task,
    loss: SmoothedLoss,
) -> Result:
    state, best = ended.state, ended.early_stopping.best
    exported_step = ended.step
    if _is_result_best(run.recipe) and best and best.step != ended.step:
        state, exported_step = checkpoints.restore(best.step, state), best.step
    with run.console.status("writing and verifying the result"):
        path = export_result(
            run.output,
            dataclasses.replace(run.model, trainable=task.shown(state), buffers={}),
            run.method,
            run.source,
            run.base,
            run.tokenizer,
            ends=run.ends,
            layout=run.layout,
            job=run.job,
        )
    fields = _facts(run, record, "finished") | {
        "step": ended.step,
        "exported_step": exported_step,
        "loss": ended.last_loss,
        "smoothed_loss": loss.value,
        "result": path.name,
    }
    if run.job.is_main_process:
        fields[RESULT_DIGEST] = read_digests(path)[1]
    if best is not None:
        fields["best"] = dataclasses.asdict(best)
    _write_run(run, fields)
    _write_report(run)
    result = _result(run, ended, loss, path, None)
    banner.show_summary(run.console, result, exported_step)
    return result


def _result(
    run: PreparedRun, ended: Ended, loss: SmoothedLoss, path: pathlib.Path | None, interrupted: int | None
) -> Result:
    return Result(
        output=run.output,
        steps=ended.step,
        total=run.total_steps,
        loss=ended.last_loss,
        eval_loss=ended.last_evaluation,
        best=ended.early_stopping.best,
        path=path,
        seconds=time.monotonic() - run.started,
        interrupted=interrupted,
        smoothed_loss=loss.value,
    )
