"""Builds the loop's task from the parts of a run: compiled step, cadence, evaluation and sampling."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np
from rich.console import Console

from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import Tree, merge, named_leaves
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import PreparedData
from meshtune.errors import counted
from meshtune.kernels.attention import zigzag_order
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import Job
from meshtune.model.compute import Compute
from meshtune.objectives.score import Batch
from meshtune.optim.optimizer import Optimizer, Schedule
from meshtune.plan.fit import MemoryCheck
from meshtune.setup.assemble import step_for
from meshtune.setup.memory import size_in_words
from meshtune.setup.resolved import ResolvedRun
from meshtune.setup.stage import evaluation_objective_of
from meshtune.train.checkpoint.checkpoints import Record
from meshtune.train.evaluation.cadence import Cadence, at_interval, evaluations, save_interval
from meshtune.train.evaluation.early_stopping import EarlyStopping
from meshtune.train.evaluation.evaluate import Evaluation, evaluate
from meshtune.train.loop import LoadedBatches, Task
from meshtune.train.lost_updates import LostUpdates
from meshtune.train.shrink import check_compiled
from meshtune.train.step.build import make_eval_step
from meshtune.train.step.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run once its weights are loaded."""

    recipe: Recipe
    resolved: ResolvedRun
    compute: Compute
    data: PreparedData
    total: int
    tokenizer: PreTrainedTokenizerFast
    console: Console
    model: PreparedModel
    optimizer: Optimizer
    schedule: Schedule
    job: Job
    memory: MemoryCheck


def make_task(parts: Parts, record: Record, state: TrainState) -> Task:
    """Builds the task that continues from `record.step`; compiles the training step if any updates remain."""
    recipe, loader = parts.recipe, parts.data.train
    place = _placing(parts)
    step = step_for(recipe, parts.resolved, parts.compute, parts.optimizer)
    if record.step < parts.total:
        step = _compiled(parts, step, state, place(loader.batch(0).arrays))
    rates = np.asarray(jax.vmap(parts.schedule)(np.arange(parts.total)))
    early = recipe.eval
    return Task(
        step=step,
        frozen=parts.model.frozen,
        batches=LoadedBatches(loader.iterate, record.step, parts.total),
        place=place,
        shown=lambda state: merge(parts.optimizer.evaluated(state.trainable, state.opt_state), state.buffers),
        learning_rate=lambda number: float(rates[number]),
        epoch_at=lambda number: _epoch_at(parts, number),
        cadence=Cadence(
            parts.total,
            evaluate=evaluations(early.every, parts.total, loader.epoch_position),
            sample=at_interval(recipe.sample.every, parts.total),
            save=at_interval(save_interval(recipe.checkpoint.every, parts.total), parts.total),
        ),
        record=record,
        early_stopping=EarlyStopping(early.early_stopping, early.min_delta, record.best, record.stale),
        keep_best=recipe.checkpoint.keep_best,
        evaluate=_evaluator(parts, place),
        evaluate_at_start=early.at_start,
        sample=_sampler(parts),
        announce=functools.partial(_announcement, recipe, _matrices(parts), record.step),
        # Block-coordinate updates keep a float32 copy of the layer that they train; random rounding loses nothing.
        lost_updates=None
        if parts.optimizer.blocks is not None or recipe.optimizer.stochastic_rounding
        else LostUpdates(parts.resolved.arrays.trainable, rates, record.step),
    )


def _announcement(recipe: Recipe, matrices: int, start: int, done: int) -> str | None:
    """What makes the update after `done` ones slower than others."""
    if recipe.optimizer.name == "galore" and done % recipe.optimizer.update_gap == 0:
        return f"computing the projectors of {counted(matrices, 'matrix', 'matrices')}: this update takes longer"
    if recipe.optimizer.name == "muon" and done == start:
        return f"every update orthogonalises {counted(matrices, 'matrix', 'matrices')}: the first one may take a while"
    return None


def _matrices(parts: Parts) -> int:
    """Matrices that are trained in the layers, each expert's among them."""
    arrays = (array for _, array in named_leaves(parts.resolved.arrays.trainable))
    return sum(math.prod(array.shape[:-2]) for array in arrays if array.role in ("matrix", "experts"))


def _placing(parts: Parts) -> Callable[[dict[str, np.ndarray]], Batch]:
    """Returns the function that places a batch on the devices, in zigzag order under context parallelism."""
    layout = parts.compute.layout
    cp = 1 if layout is None else layout.size("cp")
    order = zigzag_order(parts.data.train.row_length, cp) if cp > 1 else None

    def place(arrays: dict[str, np.ndarray]) -> Batch:
        fits = order is not None and arrays["tokens"].shape[-1] == len(order)
        return place_batch(arrays, layout, order if fits else None)

    return place


def _compiled(parts: Parts, step: jax.stages.Wrapped, state: TrainState, batch: Batch) -> jax.stages.Compiled:
    started = time.monotonic()
    with parts.console.status("compiling the training step"):
        compiled = step.lower(state, parts.model.frozen, batch, np.int32(0)).compile()
    facts = compiled.memory_analysis()
    memory = ""
    if facts is not None:
        temporary = facts.output_size_in_bytes - facts.alias_size_in_bytes + facts.temp_size_in_bytes
        where = "of device memory" if parts.compute.layout is None else "of memory on each device"
        memory = f"; it needs {size_in_words(facts.argument_size_in_bytes + temporary)} {where}"
    parts.console.print(f"[bold]compiled[/] the training step in {time.monotonic() - started:.1f} s{memory}")
    if facts is not None and parts.recipe.compute.memory_check:
        check_compiled(parts.memory, facts.argument_size_in_bytes, temporary, parts.job)
    return compiled


def _epoch_at(parts: Parts, step: int) -> float:
    if step == 0:
        return 0.0
    epoch, within = parts.data.train.epoch_position(step - 1)
    return epoch + (within + 1) / parts.data.train.steps_per_epoch(epoch)


def _evaluator(parts: Parts, place: Callable[[dict[str, np.ndarray]], Batch]) -> Callable[[Tree], Evaluation] | None:
    loader = parts.data.validation
    if loader is None or parts.recipe.eval.every is None:
        return None
    step = make_eval_step(evaluation_objective_of(parts.recipe), parts.model.spec, parts.compute)

    def run(trainable: Tree) -> Evaluation:
        with contextlib.closing(loader.iterate(0, loader.steps_per_epoch(0))) as batches:  # pyright: ignore[reportArgumentType]
            arrays = (batch.arrays for batch in batches)
            return evaluate(step, parts.model.spec, trainable, parts.model.frozen, arrays, place=place)

    return run


def _sampler(parts: Parts) -> Callable[[Tree], Iterator[tuple[str, str]]] | None:
    options = parts.recipe.sample
    if not options.prompts:
        return None
    from meshtune.generate.samples import sample

    chat = parts.data.report.template is not None

    def run(trainable: Tree) -> Iterator[tuple[str, str]]:
        texts = sample(
            merge(trainable, parts.model.frozen),
            parts.model.spec,
            parts.compute,
            parts.tokenizer,
            options.prompts,
            chat=chat,
            system=parts.recipe.data.system if chat else None,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=parts.recipe.seed,
        )
        return zip(options.prompts, texts, strict=True)

    return run
