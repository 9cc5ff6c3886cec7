"""Builds the loop's task from the run of a run: compiled step, cadence, evaluation and sampling."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from meshtune.arrays.tree import Tree, merge, named_leaves
from meshtune.config.recipe import CheckpointSection, Recipe
from meshtune.config.section import seconds_of
from meshtune.costs.goodput import mean_time_between_failures
from meshtune.errors import amount
from meshtune.kernels.attention import zigzag_order
from meshtune.lazy import LazyFunction
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import local_rows, place_batch
from meshtune.objectives.answers import Batch
from meshtune.objectives.config import ONLINE_STAGES
from meshtune.setup.memory import size_in_words
from meshtune.setup.stage import evaluation_objective_of
from meshtune.train.assemble import LoadedRun, step_for
from meshtune.train.checkpoint.checkpoints import Record
from meshtune.train.checkpoint.save_timer import SaveTimer
from meshtune.train.evaluation.evaluate import (
    Cadence,
    EarlyStopping,
    Evaluation,
    at_interval,
    evaluate,
    evaluations,
    save_interval,
)
from meshtune.train.loop import BatchSource, LoadedBatches, LostUpdates, PlacedBatch, Task
from meshtune.train.run_setup import check_compiled
from meshtune.train.step.build import make_eval_step
from meshtune.train.step.state import Metrics, TrainState, result_params
from meshtune.train.watchdog import Watchdog

rollout_source = LazyFunction("meshtune.train.online:rollout_source")
named_rows = LazyFunction("meshtune.rollout.distill:NamedRows")
evaluate_online = LazyFunction("meshtune.train.online:evaluate_online")


def make_task(run: LoadedRun, record: Record, state: TrainState) -> Task:
    """Builds the task that continues from `record.step`; compiles the training step if any updates remain."""
    recipe, loader = run.recipe, run.data.train
    order = _order(run)
    place = _placing(run.compute.layout, order)
    step = step_for(run, run.compute, run.optimizer)
    if recipe.rollout is not None:
        batches = rollout_source(run, place, order, start=record.step)
        if batches.kl_coef is not None and record.kl_coef is not None:
            batches.kl_coef = record.kl_coef
        first = batches.empty_batch()
    else:
        # Without rollouts it is no PromptLoader, whose module would be imported to say so.
        if recipe.data.streaming and run.compute.layout is not None:
            rows = local_rows(run.compute.layout, loader.batch_size, recipe.train.accumulation)
            loader.share(*rows, processes=run.processes_per_host)  # pyright: ignore[reportAttributeAccessIssue]
        batches = LoadedBatches(loader.iterate, record.step, run.total_steps)  # pyright: ignore[reportAttributeAccessIssue]
        first = loader.empty_arrays() if record.step < run.total_steps else {}  # pyright: ignore[reportAttributeAccessIssue]
    if record.step < run.total_steps:
        pictures = getattr(loader, "pictures", None)
        batches_of_all_shapes = [first] if pictures is None else pictures.batches(first)
        step = _compiled_steps(run, step, state, map(place, batches_of_all_shapes))
    rates = np.asarray(jax.vmap(run.schedule)(np.arange(run.total_steps)))
    early = recipe.eval
    return Task(
        step=step,
        frozen=run.frozen,
        batches=batches,
        place=place,
        shown=lambda state: result_params(run.optimizer, state),
        learning_rate=lambda number: float(rates[number]),
        epoch_at=lambda number: _epoch_at(run, number),
        cadence=Cadence(
            run.total_steps,
            evaluate=evaluations(early.every, run.total_steps, loader.epoch_position),
            sample=at_interval(recipe.sample.every, run.total_steps),
            save=at_interval(save_interval(recipe.checkpoint.every, run.total_steps), run.total_steps),
        ),
        save_timer=_save_timer(recipe.checkpoint),
        watchdog=Watchdog(run.job, factor=recipe.train.hang_factor, seconds=recipe.train.hang_seconds),
        record=record,
        early_stopping=EarlyStopping(early.early_stopping, early.min_delta, record.best, record.stale),
        keep_best=recipe.checkpoint.keep_best,
        evaluate=_evaluator(run, place, batches),
        evaluate_at_start=early.at_start,
        sample=_sampler(run),
        announce=functools.partial(_announcement, recipe, _matrices(run), record.step),
        # Block-coordinate updates keep a float32 copy of the layer that they train; random rounding loses nothing.
        lost_updates=None
        if run.optimizer.blocks is not None or recipe.optimizer.stochastic_rounding
        else LostUpdates(run.arrays.trainable, rates, record.step),
    )


def _save_timer(options: CheckpointSection) -> SaveTimer:
    """Returns the timer of saves that `checkpoint.every` sets by a time or `auto`."""
    if not isinstance(options.every, str):
        return SaveTimer()
    if options.every != "auto":
        return SaveTimer(seconds_of(options.every))
    mtbf = mean_time_between_failures(jax.device_count()) if options.mtbf is None else seconds_of(options.mtbf)
    return SaveTimer(mtbf=mtbf)


def _announcement(recipe: Recipe, matrices: int, start: int, done: int) -> str | None:
    """Says why the update after `done` ones is slower than others, if it is."""
    if recipe.optimizer.name == "galore" and done % recipe.optimizer.update_gap == 0:
        return f"computing the projectors of {amount(matrices, 'matrix', 'matrices')}: this update takes longer"
    if recipe.optimizer.name == "muon" and done == start:
        return f"every update orthogonalises {amount(matrices, 'matrix', 'matrices')}: the first one may take a while"
    return None


def _matrices(run: LoadedRun) -> int:
    """Matrices that are trained in the layers, each expert's among them."""
    arrays = (array for _, array in named_leaves(run.arrays.trainable))
    return sum(math.prod(array.shape[:-2]) for array in arrays if array.role in ("matrix", "experts"))


def _order(run: LoadedRun) -> np.ndarray | None:
    """Returns the zigzag order of positions under context parallelism."""
    layout = run.compute.layout
    cp = 1 if layout is None else layout.size("cp")
    return zigzag_order(run.data.train.row_length, cp) if cp > 1 else None


def _placing(layout: Layout | None, order: np.ndarray | None) -> Callable[[dict[str, np.ndarray]], Batch]:
    """Returns the function that places a batch on the devices, its positions in `order` if there is one."""

    def place(arrays: dict[str, np.ndarray]) -> Batch:
        fits = order is not None and arrays["tokens"].shape[-1] == len(order)
        return place_batch(arrays, layout, order if fits else None)

    return place


def _compiled_steps(
    run: LoadedRun, step: jax.stages.Wrapped, state: TrainState, batches: Iterable[PlacedBatch]
) -> Callable[[TrainState, Tree, PlacedBatch, np.int32], tuple[TrainState, Metrics]]:
    """The step, compiled for batches of each of these shapes, the one that needs the most memory first; for another
    shape when it comes."""
    compiled = {_shapes(batch): _compile(run, step, state, batch) for batch in batches}

    def apply(state: TrainState, frozen: Tree, batch: PlacedBatch, seed: np.int32) -> tuple[TrainState, Metrics]:
        if (shapes := _shapes(batch)) not in compiled:
            compiled[shapes] = _compile(run, step, state, batch)
        return compiled[shapes](state, frozen, batch, seed)

    return apply


def _shapes(batch: PlacedBatch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, array.shape) for name, array in sorted(batch.items()))


def _compile(run: LoadedRun, step: jax.stages.Wrapped, state: TrainState, batch: PlacedBatch) -> jax.stages.Compiled:
    started = time.monotonic()
    with run.console.status("compiling the training step"):
        compiled = step.lower(state, run.frozen, batch, np.int32(0)).compile()
    facts = compiled.memory_analysis()
    memory = ""
    if facts is not None:
        temporary = facts.output_size_in_bytes - facts.alias_size_in_bytes + facts.temp_size_in_bytes
        where = "of device memory" if run.compute.layout is None else "of memory on each device"
        memory = f"; it needs {size_in_words(facts.argument_size_in_bytes + temporary)} {where}"
    patches = f" for {batch['patches'].shape[-2]:,} patches a row" if "patches" in batch else ""
    run.console.print(f"[bold]compiled[/] the training step in {time.monotonic() - started:.1f} s{patches}{memory}")
    if facts is not None and run.recipe.compute.memory_check:
        check_compiled(run.memory, facts.argument_size_in_bytes, temporary, run.job)
    return compiled


def _epoch_at(run: LoadedRun, step: int) -> float:
    if step == 0:
        return 0.0
    epoch, within = run.data.train.epoch_position(step - 1)
    return epoch + (within + 1) / run.data.train.steps_per_epoch(epoch)


def _evaluator(
    run: LoadedRun, place: Callable[[dict[str, np.ndarray]], Batch], batches: BatchSource
) -> Callable[[Tree], Evaluation] | None:
    loader = run.data.validation
    if loader is None or run.recipe.eval.every is None:
        return None
    if run.recipe.stage.kind in ONLINE_STAGES:
        return functools.partial(evaluate_online, batches, run.model.frozen, loader)
    teacher = getattr(batches, "teacher", None)
    complete = dict if teacher is None else named_rows(teacher)
    step = make_eval_step(
        evaluation_objective_of(run.recipe, run.teacher and run.teacher.spec), run.model.spec, run.compute
    )

    def validate(trainable: Tree) -> Evaluation:
        with contextlib.closing(loader.iterate(0, loader.steps_per_epoch(0))) as batches:  # pyright: ignore
            arrays = (complete(batch.arrays) for batch in batches)
            return evaluate(step, run.model.spec, trainable, run.frozen, arrays, place=place)

    return validate


def _sampler(run: LoadedRun) -> Callable[[Tree], Iterator[tuple[str, str, tuple[str, ...]]]] | None:
    options = run.recipe.sample
    if not options.prompts:
        return None
    from meshtune.data.prepare import open_reader
    from meshtune.generate.pictures import load_parts, prompt_words, thumbnails
    from meshtune.generate.text import sample

    chat, recipe, prompts, reader = run.data.report.template is not None, run.recipe, options.prompts, None
    pictures: list[tuple[str, ...]] = [() for _ in prompts]
    if recipe.vision is not None:
        reader, folder = open_reader(recipe, run.tokenizer), recipe.vision.media_dir or ""
        prompts = [load_parts(reader, prompt, folder, "sample.prompts") for prompt in prompts]
        pictures = [thumbnails(prompt, folder, "sample.prompts") for prompt in options.prompts]

    def answer(trainable: Tree) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        texts = sample(
            merge(trainable, run.model.frozen),
            run.model.spec,
            run.compute,
            run.tokenizer,
            prompts,
            chat=chat,
            system=run.recipe.data.system if chat else None,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=run.recipe.seed,
            reader=reader,
        )
        return zip(map(prompt_words, options.prompts), texts, pictures, strict=True)

    return answer
