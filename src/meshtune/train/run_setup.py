"""Everything of a run that is resolved before its output directory is touched: recipe, model, data, kernels, base."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from typing import TYPE_CHECKING

from rich.console import Console

from meshtune import terminal
from meshtune.adapters.method import PreparedModel, count
from meshtune.adapters.peft_format import BaseRecord, recorded
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import DEFAULT_EPOCHS, Recipe
from meshtune.costs.hardware import Target
from meshtune.data.chat import ChatTemplate
from meshtune.data.prepare import PreparedData, prepare_data
from meshtune.data.progress import ProgressClock
from meshtune.data.tokenizer import tokenizer_of
from meshtune.errors import UserError, counted
from meshtune.mesh.agreement import code_version, first_of_each_host, require_agreement
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import Job
from meshtune.model.compute import Compute
from meshtune.model.sharding import check_batch
from meshtune.runs.output import RECIPE, check_output
from meshtune.runs.verify import check_source
from meshtune.setup.choices import WARNING, Decision, compute_of, optimizer_of
from meshtune.setup.devices import device_table, gather_devices, hosts
from meshtune.setup.fit import MemoryCheck
from meshtune.setup.machine import local_target, this_machine
from meshtune.setup.materialize import materialize_base, resumed_adapter
from meshtune.setup.memory import bytes_on_each, free_memory
from meshtune.setup.resolved import ResolvedRun, resolve_run
from meshtune.setup.search import MICRO, apply_overrides, autotune, merge_decisions
from meshtune.setup.shortage import MemoryShortage
from meshtune.setup.stage import reference_of
from meshtune.train.checkpoint.record import Record, versions
from meshtune.train.report import banner, trackers
from meshtune.train.report.console_log import ConsoleLog
from meshtune.train.step.state import TrainState
from meshtune.weights.fingerprint import base_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


TOO_LARGE = "this is not expected to fit"


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """A run whose every open choice is resolved, with its data prepared; no weights are loaded yet.

    `recipe` has no key left at 'auto' that `autotune` decides, and `fields` are its values for JSON. The run makes
    `total_steps` updates. `adapter` names the adapter that it continues from, if any, by its hash. `memory` is what is
    compared with the memory that is free.
    """

    recipe: Recipe
    fields: dict[str, object]
    output: pathlib.Path
    console: Console
    log: ConsoleLog
    job: Job
    resolved: ResolvedRun
    target: Target
    tokenizer: PreTrainedTokenizerFast
    data: PreparedData
    total_steps: int
    compute: Compute
    base: BaseRecord
    adapter: str
    decisions: list[Decision]
    processes_per_host: int
    started: float
    memory: MemoryCheck

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.recipe.train.batch_size // self.recipe.train.accumulation

    @property
    def start_hash(self) -> str:
        """What identifies the weights that the run starts from."""
        return f"{self.base.hash}{self.adapter}"

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which the chat template ends the answers that are trained on; none of plain text or scores."""
        if self.data.report.template is None or self.resolved.spec.scored:
            return ()
        end = ChatTemplate(self.tokenizer).end_of_turn.token
        return () if end is None else (end,)

    def record(self) -> Record:
        """The checkpoint record of the run's start."""
        recipe = self.fields
        return Record(
            0, self.recipe.seed, recipe, self.base.path, self.start_hash, self.data.fingerprint, versions=versions()
        )

    @property
    def halves(self) -> bool:
        """Whether a micro-batch that does not fit is made smaller."""
        return self.memory.recipe.train.micro_batch == "auto"

    def plan(self, model: PreparedModel, state: TrainState) -> banner.Plan:
        """The run in numbers, for the banner."""
        recipe, report, method = self.recipe, self.data.report, self.resolved.method
        gradients = 0 if recipe.optimizer.layerwise else bytes_on_each(model.trainable, itemsize=4)
        optimizer = optimizer_of(recipe, self.resolved.precision)
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
            state_bytes=bytes_on_each((state, model.frozen)) + gradients,
        )


def set_up_run(recipe: Recipe, output: pathlib.Path, console: Console, log: ConsoleLog, job: Job) -> RunSetup:
    """Resolves a recipe for the devices of `job`, prepares its data, and shows the devices; writes nothing to `output`.

    All processes of the job call this. Raises: UserError for whatever can be known to be wrong by now.
    """
    started = time.monotonic()
    fields = recipe.model_dump(mode="json")
    require_agreement(job, "the code", code_version(), fix="run the same image or environment on every host")
    require_agreement(job, "the recipe", fields, fix="give every process the same recipe and overrides")
    processes = gather_devices(job)
    console.print(device_table(processes))
    if job.is_main_process:
        check_output(output, resume=recipe.resume, overwrite=recipe.overwrite)
        trackers.check_installed(list(recipe.log.trackers))
    machine, host_count = this_machine(), len(hosts(processes))
    target = local_target(machine, host_count)
    requested = with_saved_micro_batch(recipe, output, job)
    recipe, autotuned = autotune(requested, target, job)
    resolved = resolve_run(recipe, machine, processes, launcher=job.info.launcher)
    check_source(resolved.source, job)
    reference = reference_of(recipe, resolved.method)
    tokenizer, _ = tokenizer_of(recipe.model, resolved.source)
    with first_of_each_host(job, "data") as share:  # the others find what it prepared
        data = _prepare_data(recipe, resolved, tokenizer, console, share)
    rows, length = recipe.train.batch_size // recipe.train.accumulation, data.train.row_length
    if resolved.layout is not None:
        check_batch(MeshConfig(**resolved.layout.mesh.shape), rows, length)
    compute, decisions = compute_of(recipe, resolved.spec, resolved.precision, rows, length, resolved.layout)
    decisions += [] if reference is None else [reference]
    total = recipe.train.steps or data.train.total_steps(recipe.train.epochs or DEFAULT_EPOCHS)
    decisions += [*warm_up_warning(recipe, total), *baseline_warning(recipe, data, rows)]
    base = BaseRecord(recipe.model.path, base_hash(resolved.source), recorded(resolved.quantize))
    adapter = resumed_adapter(recipe, resolved, base)
    inputs = {"base model": base.hash, "training data": data.fingerprint, "adapter": adapter}
    require_agreement(job, "what they read", inputs, fix="give every host the same files")
    setup = RunSetup(
        recipe=recipe,
        fields=recipe.model_dump(mode="json"),
        output=output,
        console=console,
        log=log,
        job=job,
        resolved=resolved,
        target=target,
        tokenizer=tokenizer,
        data=data,
        total_steps=total,
        compute=compute,
        base=base,
        adapter=adapter,
        decisions=merge_decisions(autotuned, [*resolved.decisions, *decisions]),
        processes_per_host=max(1, len(processes) // host_count),
        started=started,
        memory=MemoryCheck(requested, recipe, target, resolved.layout, length, free_memory(job, target.per_host)),
    )
    return _fitting(setup)


def warm_up_warning(recipe: Recipe, total: int) -> list[Decision]:
    """A warning where a warm-up takes a tenth of the updates and more, of which the first changes nothing."""
    warmup = recipe.optimizer.warmup(total)
    if not warmup or 10 * warmup < total or recipe.optimizer.warmup_steps is not None:
        return []
    fault = f"the first of {counted(total, 'update')} has a learning rate of 0"
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


def with_saved_micro_batch(recipe: Recipe, output: pathlib.Path, job: Job) -> Recipe:
    """The recipe of a run to resume, with the micro-batch that `auto` had become: it may have been made smaller since
    it was chosen."""
    if not recipe.resume or recipe.train.micro_batch != "auto":
        return recipe
    saved = None
    if job.is_main_process and (output / RECIPE).is_file():
        with contextlib.suppress(UserError, ValueError):
            saved = load_recipe(output / RECIPE, notify=silent).train.micro_batch
    saved = job.exchange("saved micro-batch", saved)[0]
    fits = isinstance(saved, int) and recipe.train.batch_size % saved == 0
    return apply_overrides(recipe, {MICRO: saved}) if fits else recipe


def _fitting(setup: RunSetup) -> RunSetup:
    """The setup if it is expected to fit the memory that is free, or with a smaller micro-batch where that is open.

    Raises: MemoryShortage if it is not, and compute.memory_check is on. All processes decide alike.
    """
    shortage = setup.memory.before_loading()
    shrinks = shortage is not None and setup.halves and setup.recipe.compute.memory_check
    rows = setup.memory.micro_batch() if shrinks else None
    fields = None if shortage is None else [shortage.what, shortage.where, shortage.fix, rows]
    fields = setup.job.exchange("memory check", fields)[0]
    if fields is None:
        return setup
    problem, where, fix, rows = fields
    if rows is not None:
        setup.console.print(f"[yellow]{problem}: trying a micro-batch of {counted(rows, 'row')}[/]", highlight=False)
        return _fitting(with_micro_batch(setup, rows))
    if setup.recipe.compute.memory_check:
        raise MemoryShortage(problem, where=where, fix=fix)
    warning = Decision(WARNING, TOO_LARGE, f"{problem}; compute.memory_check is off")
    return dataclasses.replace(setup, decisions=[warning, *setup.decisions])


def with_micro_batch(setup: RunSetup, rows: int) -> RunSetup:
    """The setup of the same run with micro-batches of `rows` rows."""
    recipe = apply_overrides(setup.recipe, {MICRO: rows})
    quiet = terminal.console(quiet=True)
    data = _prepare_data(recipe, setup.resolved, setup.tokenizer, quiet, (0, 1))
    arguments = recipe, setup.resolved.spec, setup.resolved.precision, rows, data.train.row_length
    compute, decisions = compute_of(*arguments, setup.resolved.layout)
    fresh = {choice.name: choice for choice in decisions}
    chosen = Decision("micro_batch", counted(rows, "row"), "auto: made smaller until it fits")
    outdated = (chosen.name, TOO_LARGE)
    remaining = (choice for choice in setup.decisions if choice.name not in outdated and choice.value not in outdated)
    decisions = [fresh.get(choice.name, choice) for choice in remaining]
    return dataclasses.replace(
        setup,
        recipe=recipe,
        fields=recipe.model_dump(mode="json"),
        data=data,
        compute=compute,
        decisions=[*decisions, chosen],
        memory=dataclasses.replace(setup.memory, resolved=recipe),
    )


def with_base(setup: RunSetup) -> RunSetup:
    """The setup with the model that the run starts from written to its output, where it is not one as published."""
    resolved, base = materialize_base(
        setup.resolved, setup.recipe, setup.output, setup.tokenizer, setup.base, setup.job, setup.console.print
    )
    return dataclasses.replace(setup, resolved=resolved, base=base)


def _prepare_data(
    recipe: Recipe,
    resolved: ResolvedRun,
    tokenizer: PreTrainedTokenizerFast,
    console: Console,
    share: tuple[int, int],
) -> PreparedData:
    clock = ProgressClock()
    with console.status("reading data") as status:
        data = prepare_data(
            recipe,
            tokenizer,
            vocab=resolved.spec.vocab,
            progress=lambda activity, done, of: status.update(clock.line(activity, done, of)),
            share=share,
        )
    for report in (data.report, data.validation_report):
        for warning in report.warnings if report else ():
            console.print(f"[yellow]{report.split} data:[/] {warning}" if report else "")
    longest, context = recipe.data.max_length, resolved.spec.max_length
    if context and longest > context:
        console.print(f"[yellow]data.max_length {longest} is beyond the model's context of {context} tokens[/]")
    return data
