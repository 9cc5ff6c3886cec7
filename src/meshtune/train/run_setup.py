"""Everything of a run that is decided before its output directory is touched, and smaller micro-batches for one that
does not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from meshtune import terminal
from meshtune.adapters.method import PreparedModel, count
from meshtune.adapters.peft_format import BaseRecord, quantize_record
from meshtune.arrays.tree import Tree
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.costs.hardware import Target
from meshtune.data.chat import ChatTemplate
from meshtune.data.prepare import PreparedData, open_reader, prepare_data
from meshtune.data.progress import ProgressClock
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError, amount
from meshtune.lazy import LazyFunction
from meshtune.mesh.agreement import code_version, first_of_each_host, require_agreement
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import Job
from meshtune.model.compute import Compute
from meshtune.model.gather import check_batch
from meshtune.runs.output import RECIPE, check_output, check_source
from meshtune.setup.choices import WARNING, Decision, compute_of, optimizer_of
from meshtune.setup.fit import MemoryCheck
from meshtune.setup.machine import (
    ProcessDevices,
    check_devices,
    device_table,
    gather_devices,
    local_target,
    this_machine,
)
from meshtune.setup.memory import FreeMemory, bytes_on_each, free_memory
from meshtune.setup.run import Run, resolve_run
from meshtune.setup.search import MICRO, NAMES, PATCHES, ROWS, apply_overrides, autotune, merge_decisions
from meshtune.setup.shortage import MemoryShortage, size_in_words
from meshtune.setup.stage import reference_of
from meshtune.train.checkpoint.checkpoints import Record, versions
from meshtune.train.report import banner, events
from meshtune.train.report.progress import ConsoleLog
from meshtune.train.step.state import TrainState
from meshtune.weights.inspect import base_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

materialize_start = LazyFunction("meshtune.setup.materialize:materialize_start")
teacher_server = LazyFunction("meshtune.rollout.teacher_server:TeacherServer")
resumed_adapter = LazyFunction("meshtune.setup.materialize:resumed_adapter")
TOO_LARGE = "this is not expected to fit"


@dataclasses.dataclass(frozen=True)
class PreparedRun(Run):
    """A run with its data prepared and all choices made, before any weight is loaded: the second stage.

    `requested` is the recipe as it was given, and `free` the memory that was free when the run began. The run makes
    `total_steps` updates. `adapter` names the adapter that it continues from, if any, by its hash.
    """

    requested: Recipe
    output: pathlib.Path
    console: Console
    log: ConsoleLog
    job: Job
    target: Target
    tokenizer: PreTrainedTokenizerFast
    data: PreparedData
    total_steps: int
    compute: Compute
    base: BaseRecord
    adapter: str
    processes_per_host: int
    free: FreeMemory
    started: float

    @property
    def fields(self) -> dict[str, object]:
        """The resolved recipe as values for JSON."""
        return self.recipe.model_dump(mode="json")

    @property
    def memory(self) -> MemoryCheck:
        """The comparison of what the run needs with the memory that is free."""
        length, pictures = self.data.train.row_length, getattr(self.data.train, "pictures", None)
        requested, recipe = self.requested, self.recipe
        if pictures is not None:
            requested, recipe = (apply_overrides(r, {PATCHES: pictures.sizes[0]}) for r in (requested, recipe))
        return MemoryCheck(requested, recipe, self.target, self.layout, length, self.free)

    @property
    def start_hash(self) -> str:
        """Identifies the weights that the run starts from."""
        return f"{self.base.hash}{self.adapter}"

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which the chat template ends the answers that are trained on; none of plain text or scores."""
        if self.data.report.template is None or self.spec.scored:
            return ()
        end = ChatTemplate(self.tokenizer).end_of_turn.token
        return () if end is None else (end,)

    def record(self) -> Record:
        """The checkpoint record of the run's start."""
        seed, data = self.recipe.seed, self.data.fingerprint
        return Record(0, seed, self.fields, self.base.path, self.start_hash, data, versions=versions())

    @property
    def halves(self) -> bool:
        """Whether a micro-batch that does not fit is made smaller."""
        return self.requested.train.micro_batch == "auto"

    def plan(self, model: PreparedModel, state: TrainState, frozen: Tree) -> banner.Plan:
        """The run in numbers, for the banner; `frozen` are all arrays that no update changes."""
        recipe, report, method = self.recipe, self.data.report, self.method
        gradients = 0 if recipe.optimizer.layerwise else bytes_on_each(model.trainable, itemsize=4)
        optimizer = optimizer_of(recipe, self.precision)
        return banner.Plan(
            model=recipe.model.path,
            family=model.spec.family,
            counts=count(model),
            method=method.description,
            steps=self.total_steps,
            rows=recipe.train.batch_size,
            accumulation=recipe.train.accumulation,
            length=self.data.train.row_length,
            tokens=report.counts.tokens / max(1, report.steps_per_epoch),
            records=f"{report.samples:,} {report.noun}",
            optimizer=f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule}",
            state_bytes=bytes_on_each((state, frozen)) + gradients,
        )


def set_up_run(recipe: Recipe, output: pathlib.Path, console: Console, log: ConsoleLog, job: Job) -> PreparedRun:
    """Resolves a recipe for the devices of `job`, prepares its data, and shows the devices; writes nothing to `output`.

    All processes of the job call this. Raises: UserError for whatever can be known to be wrong by now.
    """
    started = time.monotonic()
    fields = recipe.model_dump(mode="json")
    require_agreement(job, "the code", code_version(), fix="run the same image or environment on every host")
    require_agreement(job, "the recipe", fields, fix="give every process the same recipe and overrides")
    processes = gather_devices(job)
    if job.is_main_process:
        console.print(device_table(processes))
        check_output(output, resume=recipe.resume, overwrite=recipe.overwrite)
        events.check_installed(list(recipe.log.trackers))
    machine, host_count = this_machine(), job.rank("hosts", job.host)[1]
    target = local_target(machine, host_count)
    requested = with_saved_choices(recipe, output, job)
    recipe, autotuned = autotune(requested, target, job)
    run = resolve_run(recipe, machine, functools.partial(_check_mesh, job, processes))
    check_source(run.source, job)
    reference = reference_of(recipe, run.method)
    tokenizer, _ = tokenizer_of(recipe.model, run.source)
    if run.spec.vision is not None:
        open_reader(recipe, tokenizer).check_tower(run.spec.vision, recipe.model.path)
    if run.teacher is not None:
        run.teacher.check_tokenizer(tokenizer)
        run.teacher.check_pictures(recipe, tokenizer)
    elif recipe.teacher is not None:
        teacher_server(recipe.teacher, tokenizer, run.spec.vocab, job).check()
    with first_of_each_host(job, "data") as share:  # the others find what it prepared
        data = _prepare_data(run, tokenizer, console, share)
    length = data.train.row_length
    if run.layout is not None:
        check_batch(MeshConfig(**run.layout.mesh.shape), run.rows, length)
    compute, decisions = compute_of(
        recipe, run.spec, run.precision, run.rows, length, run.layout, learned=data.report.learned_share
    )
    decisions += [] if reference is None else [reference]
    total = recipe.train.steps or data.train.total_steps(recipe.train.epochs or DEFAULT_EPOCHS)
    decisions += [*warm_up_warning(recipe, total), *baseline_warning(recipe, data, run.rows)]
    base = BaseRecord(recipe.model.path, base_hash(run.source), quantize_record(run.quantize))
    adapter = "" if run.method.resumes is None else resumed_adapter(run, base)
    inputs = {"base model": base.hash, "training data": data.fingerprint, "adapter": adapter}
    require_agreement(job, "what they read", inputs, fix="give every host the same files")
    run = dataclasses.replace(run, decisions=merge_decisions(autotuned, [*run.decisions, *decisions]))
    prepared = PreparedRun(
        **vars(run),
        requested=requested,
        output=output,
        console=console,
        log=log,
        job=job,
        target=target,
        tokenizer=tokenizer,
        data=data,
        total_steps=total,
        compute=compute,
        base=base,
        adapter=adapter,
        processes_per_host=max(1, job.process_count // host_count),
        free=free_memory(job, target.per_host),
        started=started,
    )
    return _fitting(prepared)


def warm_up_warning(recipe: Recipe, total: int) -> list[Decision]:
    """Warns of a warm-up that takes a tenth of the updates or more: its first update changes nothing."""
    warmup = recipe.optimizer.warmup(total)
    if not warmup or 10 * warmup < total or recipe.optimizer.warmup_steps is not None:
        return []
    fault = f"the first of {amount(total, 'update')} has a learning rate of 0"
    why = "a warm-up begins there, as in transformers; optimizer.warmup_steps=0 begins at the full rate"
    return [Decision(WARNING, fault, why)]


def baseline_warning(recipe: Recipe, data: PreparedData, rows: int) -> list[Decision]:
    """A warning where KTO would estimate the KL divergence of a micro-batch from a single answer."""
    report = data.report
    if recipe.stage.kind != "kto" or rows * report.samples >= 2 * report.rows:
        return []
    fault = "a micro-batch has one answer, from which KTO's baseline (the KL divergence) is estimated"
    fix = "train.batch_size=8" if recipe.train.batch_size == 1 else f"train.micro_batch={recipe.train.batch_size}"
    return [Decision(WARNING, fault, f"too few for an estimate, and trl refuses it: set {fix}")]


def with_saved_choices(recipe: Recipe, output: pathlib.Path, job: Job) -> Recipe:
    """The recipe of a run to resume, with the micro-batch and the rows of a rollout that were chosen for it: they may
    have been made smaller since."""
    rows_are_open = recipe.rollout is not None and recipe.rollout.rows is None
    if not recipe.resume or not (recipe.train.micro_batch == "auto" or rows_are_open):
        return recipe
    micro_batch = rows = None
    if job.is_main_process and (output / RECIPE).is_file():
        with contextlib.suppress(UserError, ValueError):
            saved = load_recipe(output / RECIPE, notify=silent)
            micro_batch, rows = saved.train.micro_batch, None if saved.rollout is None else saved.rollout.rows
    micro_batch, rows = job.broadcast("saved choices", [micro_batch, rows])
    choices = {}
    if (
        recipe.train.micro_batch == "auto"
        and isinstance(micro_batch, int)
        and not recipe.train.batch_size % micro_batch
    ):
        choices[MICRO] = micro_batch
    if rows_are_open and rows is not None:
        choices[ROWS] = rows
    return apply_overrides(recipe, choices)


def _check_mesh(job: Job, processes: Sequence[ProcessDevices], mesh: MeshConfig) -> None:
    """Raises UserError, on all processes alike, if the devices of `processes`, which process 0 knows, are not those of
    the mesh."""
    fields = None
    try:
        if job.is_main_process:
            check_devices(processes, mesh.devices, mesh=str(mesh), launcher=job.info.launcher)
    except UserError as error:
        fields = [error.what, error.where, error.fix]
    fields = job.broadcast("devices of the mesh", fields)
    if fields is not None:
        problem, where, fix = fields
        raise UserError(problem, where=where, fix=fix)


def _fitting(run: PreparedRun) -> PreparedRun:
    """The run if it is expected to fit the memory that is free, or with a smaller micro-batch where that is open.

    Raises: MemoryShortage if it is not, and compute.memory_check is on. All processes decide alike.
    """
    run = _with_rollout_rows(run)
    shortage = run.memory.before_loading()
    shrinks = shortage is not None and run.halves and run.recipe.compute.memory_check
    rows = run.memory.micro_batch() if shrinks else None
    fields = None if shortage is None else [shortage.what, shortage.where, shortage.fix, rows]
    fields = run.job.broadcast("memory check", fields)
    if fields is None:
        return run
    problem, where, fix, rows = fields
    if rows is not None:
        run.console.print(f"[yellow]{problem}: trying a micro-batch of {amount(rows, 'row')}[/]", highlight=False)
        return _fitting(with_micro_batch(run, rows))
    if run.recipe.compute.memory_check:
        raise MemoryShortage(problem, where=where, fix=fix)
    warning = Decision(WARNING, TOO_LARGE, f"{problem}; compute.memory_check is off")
    return dataclasses.replace(run, decisions=[warning, *run.decisions])


def _with_rollout_rows(run: PreparedRun) -> PreparedRun:
    """The run with as many rows of a rollout as fit the memory that is free, where the recipe leaves them open."""
    rollout = run.recipe.rollout
    if rollout is None or run.requested.rollout is None or run.requested.rollout.rows is not None:
        return run
    rows = run.job.broadcast("rows of a rollout", run.memory.rollout_rows())
    if rows is None or (rollout.rows is not None and rows >= rollout.rows):
        return run
    chosen = Decision(NAMES[ROWS], f"{amount(rows, 'completion')} at once", "auto: the most that fit the free memory")
    others = [choice for choice in run.decisions if choice.name != chosen.name]
    return dataclasses.replace(run, recipe=apply_overrides(run.recipe, {ROWS: rows}), decisions=[*others, chosen])


def with_micro_batch(run: PreparedRun, rows: int) -> PreparedRun:
    """The same run with micro-batches of `rows` rows."""
    recipe = apply_overrides(run.recipe, {MICRO: rows})
    run = dataclasses.replace(run, recipe=recipe)
    data = _prepare_data(run, run.tokenizer, terminal.console(quiet=True), (0, 1))
    compute, decisions = compute_of(
        recipe,
        run.spec,
        run.precision,
        rows,
        data.train.row_length,
        run.layout,
        learned=data.report.learned_share,
    )
    fresh = {choice.name: choice for choice in decisions}
    chosen = Decision("micro_batch", amount(rows, "row"), "auto: made smaller until it fits")
    outdated = (chosen.name, TOO_LARGE)
    remaining = (choice for choice in run.decisions if choice.name not in outdated and choice.value not in outdated)
    decisions = [*(fresh.get(choice.name, choice) for choice in remaining), chosen]
    return dataclasses.replace(run, data=data, compute=compute, decisions=decisions)


def with_base(run: PreparedRun) -> PreparedRun:
    """The run with the model that it starts from written to its output, where that is not a published one."""
    if not run.start.changed:
        return run
    assert run.base.hash is not None
    arguments = run.output, run.tokenizer, run.base.hash, run.job, run.console.print
    source = materialize_start(run.start, run.recipe, *arguments)
    base = BaseRecord(str(source), base_hash(source), run.base.quantize)
    return dataclasses.replace(run, source=source, base=base)


def _prepare_data(
    run: Run, tokenizer: PreTrainedTokenizerFast, console: Console, share: tuple[int, int]
) -> PreparedData:
    clock = ProgressClock()
    with console.status("reading data") as status:
        data = prepare_data(
            run.recipe,
            tokenizer,
            vocab=run.spec.vocab,
            progress=lambda activity, done, of: status.update(clock.line(activity, done, of)),
            share=share,
        )
    for report in (data.report, data.validation_report):
        for warning in report.warnings if report else ():
            console.print(f"[yellow]{report.split} data:[/] {warning}" if report else "")
    longest, context = run.recipe.data.max_length, run.spec.max_length
    if context and longest > context:
        console.print(f"[yellow]data.max_length {longest} is beyond the model's context of {context} tokens[/]")
    return data


class CompiledShortage(MemoryShortage):
    """A compiled step does not fit. All processes raise it; `rows` is the micro-batch that does, if any."""

    rows: int | None = None


def check_compiled(memory: MemoryCheck, arguments: int, temporary: int, job: Job) -> None:
    """Raises CompiledShortage, on all processes alike, for a step whose temporary arrays exceed the free memory of
    a device. Its arguments are there already, but for what a CPU's estimate counts of the host."""
    free = free_memory(job, memory.target.per_host).device
    arguments, temporary = job.maximum("compiled memory", [arguments, temporary])
    if temporary <= free:
        return
    rows, fix = memory.micro_batch(arguments + temporary), memory.fix(arguments + temporary)
    rows, fix = job.broadcast("compiled memory: fix", [rows, fix])
    error = CompiledShortage(
        f"the compiled step needs {size_in_words(arguments + temporary)} of memory on each device, "
        f"{size_in_words(temporary)} of them beside what is loaded, and {size_in_words(free)} are free",
        where=memory.rows_in_words,
        fix=fix,
    )
    error.rows = rows
    raise error


def smaller_micro_batches(run: PreparedRun) -> Iterator[int]:
    """Micro-batches of at most half the rows that batch and mesh allow, largest first."""
    recipe, layout = run.recipe, run.layout
    if recipe.optimizer.in_backward:
        return
    for rows in range(run.rows // 2, 0, -1):
        if recipe.train.batch_size % rows:
            continue
        try:
            if layout is not None:
                check_batch(MeshConfig(**layout.mesh.shape), rows, run.data.train.row_length)
        except UserError:
            continue
        yield rows


def runtime_fix(run: PreparedRun, saved: int | None) -> str:
    """Suggests changes for a run that ran out of memory while it loaded or computed; `saved` is its last checkpoint."""
    recipe, compute, length = run.recipe, run.compute, run.data.train.row_length
    fixes = [f"train.micro_batch={rows} (the result stays the same)" for rows in smaller_micro_batches(run)][:1]
    if compute.remat != "full":
        fixes.append("compute.remat=full")
    if "residual" not in compute.offload and compute.platform != "cpu":
        fixes.append("compute.offload=[residual]")
    if recipe.method.adapters is not None and recipe.quantize is None:
        fixes.append("quantize=nf4")
    fixes.append(f"data.max_length below {length}")
    go_on = f"resume=true accept_changes=true goes on from update {saved}; " if saved is not None else ""
    return f"{go_on}from the mildest to the strongest: {', '.join(fixes)}"
