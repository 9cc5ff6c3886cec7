"""A recipe in, a tuned model out: the order of the work, whatever can fail first."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import Prepared, abstract, count
from meshtune.adapters.method import prepare as split_parameters
from meshtune.adapters.peft_format import BaseRecord
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import Prepared as Data
from meshtune.data.prepare import prepare as prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.model.tree import Tree, merge
from meshtune.objectives import OBJECTIVES
from meshtune.optim.build import make_optimizer
from meshtune.train import banner, metrics_log, trackers
from meshtune.train.cadence import Cadence, evaluations, every, save_interval
from meshtune.train.checkpoint import Best, Checkpoints, Record, disk_reason, versions
from meshtune.train.early_stopping import EarlyStopping
from meshtune.train.evaluate import Evaluation, evaluate
from meshtune.train.events import opened
from meshtune.train.final import export_result
from meshtune.train.interrupt import interruptible
from meshtune.train.loop import Ended, Task, run_loop
from meshtune.train.memory import size_in_words
from meshtune.train.output import CHECKPOINTS, check_output, claimed, write_recipe, write_run
from meshtune.train.plot import LossPlot
from meshtune.train.progress import ProgressBar
from meshtune.train.resolve import Precision, compute_of, method_of, optimizer_of, precision_of
from meshtune.train.resume import Resumed, find_resume
from meshtune.train.step import TrainState, init_state, make_eval_step, make_train_step
from meshtune.weights.fingerprint import base_hash
from meshtune.weights.hub import locate
from meshtune.weights.load import load_config, load_params, load_spec, stored_dtype

DEFAULT_EPOCHS = 3.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a run.

    `steps` updates of `total` are made; `loss` is that of the last one, `eval_loss` of the last evaluation (None if
    there was none in this process). `path` is the adapter or model, None if the run was interrupted; `interrupted` is
    then the signal's number.
    """

    output: pathlib.Path
    steps: int
    total: int
    loss: float | None
    eval_loss: float | None
    best: Best | None
    path: pathlib.Path | None
    seconds: float
    interrupted: int | None = None


def train(recipe: Recipe, *, console: Console | None = None) -> Result:
    """Runs a recipe, or goes on with it (`recipe.resume`), and leaves everything in `recipe.output`.

    Raises: UserError for whatever is wrong with recipe, data, model, disk or numbers. Ctrl-C and SIGTERM end the run
    after the update under way, saved, with `Result.interrupted` set.
    """
    console = console or Console(highlight=False)
    output = pathlib.Path(recipe.output).expanduser()
    try:
        return _Run(recipe, output, console).run()
    except OSError as error:
        if isinstance(error, UserError) or not (reason := disk_reason(error)):
            raise
        raise UserError(
            f"the run cannot write: {reason}",
            where=str(error.filename or output),
            fix="make room or make it writable; then the same command with resume=true goes on from what was saved",
        ) from error


class _Run:
    def __init__(self, recipe: Recipe, output: pathlib.Path, console: Console):
        self.recipe, self.output, self.console = recipe, output, console
        self.began = time.monotonic()
        self.fields: dict[str, Any] = recipe.model_dump(mode="json")

    def run(self) -> Result:
        recipe, console = self.recipe, self.console
        check_output(self.output, resume=recipe.resume, overwrite=recipe.overwrite)
        trackers.check_installed(list(recipe.log.trackers))
        banner.show_devices(console)
        self.source = locate(recipe.model.path, recipe.model.revision)
        self.method = method_of(recipe)
        precision, chosen = precision_of(recipe, stored_dtype(self.source, load_config(self.source)))
        self.base_spec, _ = load_spec(self.source, precision.frozen)
        abstract(self.method, self.base_spec, precision.trainable)  # a method that cannot be fails here
        self.tokenizer = load_tokenizer(
            recipe.model.tokenizer or self.source, recipe.model.chat_template, revision=recipe.model.revision
        )
        self.data = self._data()
        self.total = recipe.train.steps or self.data.train.total_steps(recipe.train.epochs or DEFAULT_EPOCHS)
        rows = recipe.train.batch_size // recipe.train.accumulation
        self.compute, choices = compute_of(recipe, self.base_spec, precision, rows, self.data.train.row_length)
        self.base = BaseRecord(recipe.model.path, base_hash(self.source))
        with claimed(self.output, overwrite=recipe.overwrite) as aside:
            if aside is not None:
                console.print(f"the old run is now in {aside}")
            with Checkpoints(self.output / CHECKPOINTS, keep=recipe.checkpoint.keep) as checkpoints:
                return self._train(checkpoints, precision, [chosen, *choices])

    def _train(self, checkpoints: Checkpoints, precision: Precision, choices: list[banner.Choice]) -> Result:
        record = Record(0, self.recipe.seed, self.fields, self.base.path, self.base.hash or "", self.data.fingerprint)
        record = dataclasses.replace(record, versions=versions())
        resumed = find_resume(checkpoints, record) if self.recipe.resume else None
        self._note_resume(resumed)
        made, state, optimizer, schedule = self._parameters(precision)
        if resumed is not None:
            state = checkpoints.restore(resumed.step, state)
            record = dataclasses.replace(record, step=resumed.step, best=resumed.best, stale=resumed.stale)
        banner.show_plan(self.console, self._plan(made, state, precision), choices)
        metrics_log.cut_back(self.output, resumed.step if resumed else None)
        write_recipe(self.output, self.fields | {"resume": False, "overwrite": False})
        write_run(self.output, self._about(record, "running"))
        task = self._task(record, made, state, optimizer, schedule)
        with interruptible() as interrupt:
            with opened(self._sinks(record.step)) as events:
                ended = run_loop(task, state, checkpoints, events, interrupt)
            checkpoints.wait()
        if ended.interrupted is not None and ended.step < self.total:
            return self._interrupted(ended)
        return self._finished(ended, made, checkpoints, record)

    def _data(self) -> Data:
        with self.console.status("reading data") as status:
            data = prepare_data(
                self.recipe,
                self.tokenizer,
                vocab=self.base_spec.vocab,
                progress=lambda what, done, of: status.update(f"{what}: {done:,} of {of:,}"),
            )
        for report in (data.report, data.validation_report):
            for warning in report.warnings if report else ():
                self.console.print(f"[yellow]{report.split} data:[/] {warning}" if report else "")
        longest, context = self.recipe.data.max_length, self.base_spec.rope.max_length
        if context and longest > context:
            self.console.print(
                f"[yellow]data.max_length {longest} is beyond the model's context of {context} tokens[/]"
            )
        return data

    def _parameters(self, precision: Precision):
        """(the split model, its first state, optimizer, schedule), with the weights of the base."""
        with self.console.status("loading weights") as status:
            params = load_params(
                self.source,
                self.base_spec,
                progress=lambda done, of: status.update(
                    f"loading weights: {size_in_words(done)} of {size_in_words(of)}"
                ),
            )
        key = jax.random.fold_in(jax.random.key(self.recipe.seed), 0)
        made = split_parameters(self.method, self.base_spec, params, key, precision.trainable)
        optimizer, schedule = make_optimizer(optimizer_of(self.recipe, precision), self.total, made.trainable)
        return made, init_state(made.trainable, optimizer), optimizer, schedule

    def _task(self, record: Record, made: Prepared, state: TrainState, optimizer: Any, schedule: Any) -> Task:
        recipe, loader = self.recipe, self.data.train
        objective = OBJECTIVES["sft"]
        step: Any = make_train_step(
            objective,
            made.spec,
            self.compute,
            optimizer,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            dropout=isinstance(self.method, LoraConfig) and self.method.dropout > 0,
        )
        rates = np.asarray(jax.vmap(schedule)(np.arange(self.total)))
        early = recipe.eval
        return Task(
            step=self._compiled(step, state, made.frozen) if record.step < self.total else step,
            frozen=made.frozen,
            batches=loader.iterate,
            learning_rate=lambda number: float(rates[number]),
            epoch_at=self._epoch_at,
            cadence=Cadence(
                self.total,
                evaluate=evaluations(early.every, self.total, loader.place),
                sample=every(recipe.sample.every, self.total),
                save=every(save_interval(recipe.checkpoint.every, self.total), self.total),
            ),
            record=record,
            early_stopping=EarlyStopping(early.early_stopping, early.min_delta, record.best, record.stale),
            evaluate=self._evaluator(made),
            evaluate_at_start=early.at_start,
            sample=self._sampler(made),
            keep_best=recipe.checkpoint.keep_best,
        )

    def _compiled(self, step: Any, state: TrainState, frozen: Tree) -> Any:
        began = time.monotonic()
        with self.console.status("compiling the training step"):
            compiled = step.lower(state, frozen, self.data.train.batch(0).arrays, np.int32(0)).compile()
        facts = compiled.memory_analysis()
        words = ""
        if facts is not None:
            held = facts.argument_size_in_bytes + facts.output_size_in_bytes - facts.alias_size_in_bytes
            words = f"; it needs {size_in_words(held + facts.temp_size_in_bytes)} of device memory"
        self.console.print(f"[bold]compiled[/] the training step in {time.monotonic() - began:.1f} s{words}")
        return compiled

    def _evaluator(self, made: Prepared):
        loader = self.data.validation
        if loader is None or self.recipe.eval.every is None:
            return None
        step = make_eval_step(OBJECTIVES["sft"], made.spec, self.compute)

        def run(trainable: Tree) -> Evaluation:
            with contextlib.closing(loader.iterate(0, loader.steps_per_epoch(0))) as batches:  # pyright: ignore[reportArgumentType]
                return evaluate(step, trainable, made.frozen, (batch.arrays for batch in batches))

        return run

    def _sampler(self, made: Prepared):
        asked = self.recipe.sample
        if not asked.prompts:
            return None
        from meshtune.generate.samples import sample

        chat = self.data.report.template is not None

        def run(trainable: Tree) -> Iterator[tuple[str, str]]:
            texts = sample(
                merge(trainable, made.frozen),
                made.spec,
                self.compute,
                self.tokenizer,
                asked.prompts,
                chat=chat,
                system=self.recipe.data.system if chat else None,
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                seed=self.recipe.seed,
            )
            return zip(asked.prompts, texts, strict=True)

        return run

    def _sinks(self, start: int) -> list[Any]:
        log, output = self.recipe.log, self.output
        history = metrics_log.read(output / metrics_log.METRICS)
        title = f"{self.source.name}, {self.recipe.method.kind}"
        sinks: list[Any] = [
            ProgressBar(self.console),
            metrics_log.MetricsLog(output, every=log.every),
            LossPlot(output, every=log.plot_every, title=title, history=history),
        ]
        return sinks + [trackers.TRACKERS[name](output, log.project, self.fields, start) for name in log.trackers]

    def _epoch_at(self, step: int) -> float:
        if step == 0:
            return 0.0
        epoch, within = self.data.train.place(step - 1)
        return epoch + (within + 1) / self.data.train.steps_per_epoch(epoch)

    def _plan(self, made: Prepared, state: TrainState, precision: Precision) -> banner.Plan:
        recipe, loader, report = self.recipe, self.data.train, self.data.report
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, made.frozen)))
        gradients = sum(leaf.size * 4 for leaf in jax.tree.leaves(made.trainable))
        optimizer = optimizer_of(recipe, precision)
        method = recipe.method.kind
        if isinstance(self.method, LoraConfig):
            method += f", rank {self.method.rank}, alpha {self.method.alpha:g}"
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
            records=report.counts.kept,
            optimizer=f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule.name}",
            state_bytes=held + gradients,
        )

    def _about(self, record: Record, status: str, **more: Any) -> dict[str, Any]:
        base = {"path": self.base.path, "hash": self.base.hash}
        return {"status": status, "versions": record.versions, "base": base, "data": record.data} | more

    def _note_resume(self, resumed: Resumed | None) -> None:
        if self.recipe.resume and resumed is None:
            self.console.print("no checkpoint yet: starting from the first update")
        if resumed is not None:
            self.console.print(f"[bold]resuming[/] after update {resumed.step}")
            for note in resumed.notes:
                self.console.print(f"[yellow]{note}[/]", highlight=False)

    def _interrupted(self, ended: Ended) -> Result:
        write_run(self.output, {"status": "interrupted", "step": ended.step})
        self.console.print(f"[bold]saved[/] after update {ended.step} of {self.total}; to go on:")
        self.console.print(f"  meshtune train {self.output}/recipe.yaml --resume", soft_wrap=True)
        return self._result(ended, None, ended.interrupted)

    def _finished(self, ended: Ended, made: Prepared, checkpoints: Checkpoints, record: Record) -> Result:
        state, best = ended.state, ended.early_stopping.best
        exported = ended.step
        if ended.early_stopping.patience and self.recipe.checkpoint.keep_best and best and best.step != ended.step:
            state, exported = checkpoints.restore(best.step, state), best.step
        with self.console.status("writing and verifying the result"):
            path = export_result(
                self.output,
                dataclasses.replace(made, trainable=state.trainable),
                self.method,
                self.source,
                self.base,
                self.tokenizer,
            )
        found = {"step": ended.step, "exported_step": exported, "loss": ended.last_loss, "result": path.name}
        if best is not None:
            found["best"] = dataclasses.asdict(best)
        write_run(self.output, self._about(record, "finished", **found))
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
        )
