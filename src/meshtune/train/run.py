"""A recipe in, a tuned model out: the order of the work, whatever can fail first."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from meshtune import terminal
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import Prepared, count
from meshtune.adapters.peft_format import BaseRecord, recorded
from meshtune.arrays.tree import merge
from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.data.prepare import PreparedData, prepare_data
from meshtune.digests import read_digests
from meshtune.errors import UserError
from meshtune.mesh.agreement import code_version, main_process_first, require_agreement
from meshtune.mesh.axes import MeshConfig
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.model.sharding import check_batch
from meshtune.objectives import STAGES
from meshtune.plan.autotune import autotune, merge_decisions
from meshtune.plan.local_target import local_target
from meshtune.runs.output import CHECKPOINTS, RESULT_DIGEST, check_output, claimed, write_recipe, write_run
from meshtune.runs.verify import check_source
from meshtune.setup.attention_check import checked_attention
from meshtune.setup.choices import Decision, compute_of, optimizer_of
from meshtune.setup.devices import device_table, gather_devices, hosts
from meshtune.setup.machine import this_machine
from meshtune.setup.materialize import materialize_base, resumed_adapter
from meshtune.setup.memory import bytes_on_each
from meshtune.setup.parameters import InitializedRun, Parameters
from meshtune.setup.resolved import resolve_run
from meshtune.setup.stage import reference_of
from meshtune.setup.start import tokenizer_of
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record, disk_reason, versions
from meshtune.train.checkpoint.resume import Resumed, find_resume
from meshtune.train.evaluation.reference import Reference
from meshtune.train.interrupt import interruptible
from meshtune.train.loop import Ended, Task, run_loop
from meshtune.train.report import banner, metrics_log, prediction, trackers
from meshtune.train.report.console_log import ConsoleLog, logged
from meshtune.train.report.events import opened
from meshtune.train.report.plot import LossPlot
from meshtune.train.report.progress import ProgressBar
from meshtune.train.report.smoothing import SmoothedLoss
from meshtune.train.result.final import export_result
from meshtune.train.result.result import Result
from meshtune.train.step.state import TrainState
from meshtune.train.task import Parts, make_task
from meshtune.weights.fingerprint import base_hash


def train(recipe: Recipe, *, console: Console | None = None, job: Job | None = None) -> Result:
    """Runs a recipe, or goes on with it (`recipe.resume`), and leaves everything in `recipe.output`.

    `job` are the processes that share the work (mesh.processes.start); all of them call this. Process 0 shows and
    writes what is not split.

    Raises: UserError for whatever is wrong with recipe, data, model, disk or numbers. Ctrl-C and SIGTERM end the run
    after the update under way, saved, with `Result.interrupted` set.
    """
    job = job or Job(ProcessInfo())
    console = console or terminal.console(quiet=not job.is_main_process)
    output = pathlib.Path(recipe.output).expanduser()
    try:
        with logged(console) as log:
            return _Run(recipe, output, console, job, log).run()
    except OSError as error:
        if isinstance(error, UserError) or not (reason := disk_reason(error)):
            raise
        raise UserError(
            f"the run cannot write: {reason}",
            where=str(error.filename or output),
            fix="make room or make it writable; then the same command with resume=true goes on from what was saved",
        ) from error


class _Run:
    def __init__(self, recipe: Recipe, output: pathlib.Path, console: Console, job: Job, log: ConsoleLog):
        self.recipe, self.output, self.console, self.job, self.log = recipe, output, console, job, log
        self.began = time.monotonic()
        self.fields: dict[str, Any] = recipe.model_dump(mode="json")
        self.loss = SmoothedLoss(1)

    def run(self) -> Result:
        recipe, console, job = self.recipe, self.console, self.job
        require_agreement(job, "the code", code_version(), fix="run the same image or environment on every host")
        require_agreement(job, "the recipe", self.fields, fix="give every process the same recipe and overrides")
        seen = gather_devices(job)
        console.print(device_table(seen))
        self.processes_a_host = max(1, len(seen) // len(hosts(seen)))
        if job.is_main_process:
            check_output(self.output, resume=recipe.resume, overwrite=recipe.overwrite)
            trackers.check_installed(list(recipe.log.trackers))
        machine = this_machine()
        self.target = local_target(machine, len(hosts(seen)))
        self.recipe, autotuned = autotune(recipe, self.target, job)
        recipe, self.fields = self.recipe, self.recipe.model_dump(mode="json")
        self.resolved = resolved = resolve_run(recipe, machine, seen, launcher=job.info.launcher)
        check_source(resolved.source, job)
        self.tokenizer = tokenizer_of(recipe, resolved.source)
        with main_process_first(job, "data"):  # the others find what it prepared, where they share a disk
            self.data = self._data()
        self.total = recipe.train.steps or self.data.train.total_steps(recipe.train.epochs or DEFAULT_EPOCHS)
        rows, length = recipe.train.batch_size // recipe.train.accumulation, self.data.train.row_length
        if resolved.layout is not None:
            check_batch(MeshConfig(**resolved.layout.mesh.shape), rows, length)
        self.compute, decisions = compute_of(recipe, resolved.spec, resolved.precision, rows, length, resolved.layout)
        compared = reference_of(recipe, resolved.method)
        decisions += [] if compared is None else [compared]
        self.base = BaseRecord(recipe.model.path, base_hash(resolved.source), recorded(resolved.quantize))
        adapter = resumed_adapter(recipe, resolved, self.base)
        same = {"base model": self.base.hash, "training data": self.data.fingerprint, "adapter": adapter}
        require_agreement(job, "what they read", same, fix="give every host the same files")
        keep = recipe.checkpoint.keep
        with self._claimed(), Checkpoints(self.output / CHECKPOINTS, keep=keep, job=job) as checkpoints:
            return self._train(checkpoints, merge_decisions(autotuned, [*resolved.decisions, *decisions]), adapter)

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """The output directory is this job's: process 0 holds it for all."""
        if not self.job.is_main_process:
            self.job.exchange("output", None)
            yield
            return
        with claimed(self.output, overwrite=self.recipe.overwrite) as aside:
            if aside is not None:
                self.console.print(f"the old run is now in {aside}", soft_wrap=True)
            self.log.open(self.output)
            self.job.exchange("output", None)
            yield

    def _train(self, checkpoints: Checkpoints, decisions: list[Decision], adapter: str) -> Result:
        self.resolved, self.base = materialize_base(
            self.resolved, self.recipe, self.output, self.tokenizer, self.base, self.job, self.console.print
        )
        start = f"{self.base.hash}{adapter}"
        record = Record(0, self.recipe.seed, self.fields, self.base.path, start, self.data.fingerprint)
        record = dataclasses.replace(record, versions=versions())
        resumed = find_resume(checkpoints, record) if self.recipe.resume else None
        self._note_resume(resumed)
        reference = Reference(self.recipe, self.resolved, self.compute, self.data, self.job, self.console.print)
        reference.from_model(self.tokenizer)
        begun = self._parameters()
        made, state = begun.made, begun.state
        reference.from_start(merge(made.trainable, made.frozen), made.spec, start)
        if resumed is not None:
            state = checkpoints.restore(resumed.step, state)
            record = dataclasses.replace(record, step=resumed.step, best=resumed.best, stale=resumed.stale)
        banner.show_plan(self.console, self._plan(made, state), decisions)
        if self.job.is_main_process:
            metrics_log.cut_back(self.output, resumed.step if resumed else None)
            write_recipe(self.output, self.fields | {"resume": False, "overwrite": False})
        self._write_run(self._about(record, "running"))
        for line in self._checked():
            self.console.print(line)
        task = make_task(self._parts(begun), record, state)
        length = self.data.train.row_length
        probes = []
        if self.job.is_main_process:
            layout = self.resolved.layout
            probes = prediction.step_probes(task.step, self.recipe, self.target, layout, length)
        with interruptible() as interrupt:
            with opened([*self._sinks(record.step), *probes]) as events:
                ended = run_loop(task, state, checkpoints, events, interrupt)
            checkpoints.wait()
        for line in prediction.summary_lines(probes, self._write_run):
            self.console.print(line)
        if ended.interrupted is not None and ended.step < self.total:
            return self._interrupted(ended)
        return self._finished(ended, made, checkpoints, record, task)

    def _checked(self) -> list[str]:
        """Nothing is trained with kernels whose numbers are wrong on this kind of device."""
        rows = self.recipe.train.batch_size // self.recipe.train.accumulation
        return checked_attention(self.compute, self.resolved.spec, rows, self.data.train.row_length)

    def _data(self) -> PreparedData:
        with self.console.status("reading data") as status:
            data = prepare_data(
                self.recipe,
                self.tokenizer,
                vocab=self.resolved.spec.vocab,
                progress=lambda what, done, of: status.update(f"{what}: {done:,} of {of:,}"),
            )
        for report in (data.report, data.validation_report):
            for warning in report.warnings if report else ():
                self.console.print(f"[yellow]{report.split} data:[/] {warning}" if report else "")
        longest, context = self.recipe.data.max_length, self.resolved.spec.max_length
        if context and longest > context:
            self.console.print(
                f"[yellow]data.max_length {longest} is beyond the model's context of {context} tokens[/]"
            )
        return data

    def _parameters(self) -> InitializedRun:
        """With the weights of the base."""
        return Parameters(
            recipe=self.recipe,
            resolved=self.resolved,
            compute=self.compute,
            data=self.data,
            total=self.total,
            job=self.job,
            processes_a_host=self.processes_a_host,
            console=self.console,
        ).initialize()

    def _parts(self, begun: InitializedRun) -> Parts:
        return Parts(
            recipe=self.recipe,
            resolved=self.resolved,
            compute=self.compute,
            data=self.data,
            total=self.total,
            tokenizer=self.tokenizer,
            console=self.console,
            made=begun.made,
            optimizer=begun.optimizer,
            schedule=begun.schedule,
        )

    def _sinks(self, start: int) -> list[Any]:
        log, output = self.recipe.log, self.output
        if not self.job.is_main_process:
            return [metrics_log.ProcessLog(output, self.job.process_index, every=log.every)]
        history = metrics_log.read(output / metrics_log.METRICS)
        stage = STAGES[self.recipe.stage.kind]
        title = f"{self.resolved.source.name}, {stage.title}, {self.recipe.method.kind}"
        self.loss = SmoothedLoss(self.total, [row["loss"] for row in history if row["kind"] == "train"])
        sinks: list[Any] = [
            self.loss,
            ProgressBar(self.console, self.loss, self.log, headline=stage.headline),
            metrics_log.MetricsLog(output, every=log.every),
            LossPlot(output, self.loss, every=log.plot_every, title=title, unit=stage.unit, history=history),
        ]
        return sinks + [trackers.TRACKERS[name](output, log.project, self.fields, start) for name in log.trackers]

    def _plan(self, made: Prepared, state: TrainState) -> banner.Plan:
        recipe, loader, report = self.recipe, self.data.train, self.data.report
        gradients = 0 if recipe.optimizer.layerwise else bytes_on_each(made.trainable, itemsize=4)
        state_bytes = bytes_on_each((state, made.frozen)) + gradients
        optimizer = optimizer_of(recipe, self.resolved.precision)
        method = self.resolved.method.words if isinstance(self.resolved.method, LoraConfig) else recipe.method.kind
        return banner.Plan(
            model=recipe.model.path,
            family=made.spec.family,
            counts=count(made),
            method=method,
            steps=self.total,
            rows=recipe.train.batch_size,
            accumulation=recipe.train.accumulation,
            length=loader.row_length,
            tokens=report.counts.tokens / max(1, report.steps_per_epoch),
            records=f"{report.samples:,} {report.noun}",
            optimizer=f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule}",
            state_bytes=state_bytes,
        )

    def _about(self, record: Record, status: str, **more: Any) -> dict[str, Any]:
        base = {name: value for name, value in dataclasses.asdict(self.base).items() if value is not None}
        facts = {"status": status, RESULT_DIGEST: None, "versions": record.versions, "base": base, "data": record.data}
        return facts | more

    def _write_run(self, fields: dict[str, Any]) -> None:
        if self.job.is_main_process:
            write_run(self.output, fields)

    def _note_resume(self, resumed: Resumed | None) -> None:
        if self.recipe.resume and resumed is None:
            self.console.print(
                f"nothing to resume: {self.output} holds no checkpoint, so the run starts from the first update",
                soft_wrap=True,
            )
        if resumed is not None:
            self.console.print(f"[bold]resuming[/] after update {resumed.step}")
            for note in resumed.notes:
                self.console.print(f"[yellow]{note}[/]", highlight=False)

    def _interrupted(self, ended: Ended) -> Result:
        self._write_run({"status": "interrupted", "step": ended.step})
        self.console.print(f"[bold]saved[/] after update {ended.step} of {self.total}; to go on:")
        line = terminal.command("train", f"{self.output}/recipe.yaml", "--resume")
        self.console.print(f"  {line}", markup=False, soft_wrap=True)
        return self._result(ended, None, ended.interrupted)

    def _finished(self, ended: Ended, made: Prepared, checkpoints: Checkpoints, record: Record, task: Task) -> Result:
        state, best = ended.state, ended.early_stopping.best
        exported = ended.step
        if ended.early_stopping.patience and self.recipe.checkpoint.keep_best and best and best.step != ended.step:
            state, exported = checkpoints.restore(best.step, state), best.step
        with self.console.status("writing and verifying the result"):
            path = export_result(
                self.output,
                dataclasses.replace(made, trainable=task.shown(state)),
                self.resolved.method,
                self.resolved.source,
                self.base,
                self.tokenizer,
                layout=self.resolved.layout,
                job=self.job,
            )
        found = {"step": ended.step, "exported_step": exported, "loss": ended.last_loss, "result": path.name}
        found["smoothed_loss"] = self.loss.value
        if self.job.is_main_process:
            found[RESULT_DIGEST] = read_digests(path)[1]
        if best is not None:
            found["best"] = dataclasses.asdict(best)
        self._write_run(self._about(record, "finished", **found))
        result = self._result(ended, path, None)
        banner.show_summary(self.console, result, exported)
        return result

    def _result(self, ended: Ended, path: pathlib.Path | None, interrupted: int | None) -> Result:
        return Result(
            output=self.output,
            steps=ended.step,
            total=self.total,
            loss=ended.last_loss,
            eval_loss=ended.last_evaluation,
            best=ended.early_stopping.best,
            path=path,
            seconds=time.monotonic() - self.began,
            interrupted=interrupted,
            smoothed_loss=self.loss.value,
        )
