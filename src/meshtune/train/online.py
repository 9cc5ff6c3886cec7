"""Online stages: the source of a run's batches, evaluation by rollouts, and `meshtune rewards`."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshtune import terminal
from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import Tree, flatten, merge
from meshtune.config.recipe import Recipe
from meshtune.config.rules import require_online
from meshtune.config.sections import RolloutSection
from meshtune.data.prompts import PromptLoader
from meshtune.errors import UserError, amount
from meshtune.generate.text import tokenizer_end
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.objectives.answers import Batch, without_adapters, without_critic
from meshtune.objectives.config import DistillConfig
from meshtune.objectives.stages import STAGES
from meshtune.options import Shard
from meshtune.rollout.batch import loss_temperature
from meshtune.rollout.distill import DistillSource
from meshtune.rollout.environment import Environments
from meshtune.rollout.generate import Completion, generate
from meshtune.rollout.replicas import FOLDER as REPLICAS
from meshtune.rollout.replicas import (
    Request,
    RolloutReplicas,
    block_spans,
    compute_blocks,
    read_weights,
    requests,
    with_arrays,
)
from meshtune.rollout.rewards import Rewards
from meshtune.rollout.saved import FOLDER, Rollout, remove_rollouts
from meshtune.rollout.scoring import Scorer
from meshtune.rollout.source import RolloutModel, RolloutSource
from meshtune.rollout.teacher_server import TeacherServer
from meshtune.runs.output import CHECKPOINTS
from meshtune.runs.rollouts import print_rollouts
from meshtune.setup.stage import vision_training
from meshtune.train.assemble import LoadedRun, load_model, load_run
from meshtune.train.evaluation.evaluate import Evaluation
from meshtune.train.report.progress import log_console
from meshtune.train.run_setup import PreparedRun, set_up_run
from meshtune.weights.ends import read_ends

JOB = Job(ProcessInfo())  # of this process only
DIGEST = "rewards.digest"  # in the folder of rollouts


def rollout_source(
    run: LoadedRun,
    place: Callable[[dict[str, np.ndarray]], Batch],
    order: np.ndarray | None,
    *,
    start: int | None = None,
) -> RolloutSource:
    """Builds the source of an online stage's batches from update `start` on; None: of no run, so nothing is written.

    `place` puts a batch on the devices, its positions in `order` if there is one.
    """
    recipe, rollout, loader = run.recipe, run.recipe.rollout, run.data.train
    assert rollout is not None
    assert isinstance(loader, PromptLoader)
    if start and recipe.accept_changes and run.job.is_main_process:
        remove_rollouts(run.output / FOLDER, after=(start - 1) // loader.updates)  # they are of the recipe before
    kind = DistillSource if isinstance(recipe.stage, DistillConfig) else RolloutSource
    ends = frozenset(read_ends(run.source)) | tokenizer_end(run.tokenizer) | frozenset(run.ends)
    scorer = Scorer(run.model.spec, run.compute, place, loss_temperature(recipe), order)
    model = RolloutModel(run.model.spec, run.compute, run.tokenizer, ends, scorer, _reference(run))
    teacher = None
    if recipe.teacher is not None and recipe.teacher.is_server:
        teacher = TeacherServer(recipe.teacher, run.tokenizer, run.model.spec.vocab, run.job)
    environments = Environments(rollout) if rollout.environment is not None else None
    return kind(
        recipe,
        loader,
        model,
        _rewards(run, start, environments) if run.job.is_main_process else None,
        lambda state: merge(merge(state.trainable, run.model.frozen), state.buffers),
        run.job,
        run.output / FOLDER,
        run.console.print,
        environments,
        teacher,
        _replicas(run, start) if rollout.replicas else None,
    )


def _replicas(run: LoadedRun, start: int | None) -> RolloutReplicas:
    """Raises: UserError for a run whose completions no other process can generate."""
    assert run.recipe.rollout is not None
    if start is None:
        raise UserError(
            "there is no run that replicas could generate for",
            where="rollout.replicas",
            fix="look at rewards with rollout.replicas=false",
        )
    assert isinstance(run.data.train, PromptLoader)
    if run.data.train.reader is not None:
        raise UserError(
            "replicas read no pictures, which the prompts of this model may have",
            where="rollout.replicas",
            fix="leave it out: the run generates by itself",
        )
    folder, paths = run.output / FOLDER / REPLICAS, _changing(run.model)
    return RolloutReplicas(folder, run.recipe.rollout, paths, run.layout, run.job, run.console.print, _identity(run))


def _changing(model: PreparedModel) -> frozenset[str]:
    return frozenset(flatten(without_critic(merge(model.trainable, model.buffers))))


def _identity(run: PreparedRun) -> dict[str, Any]:
    """What a run and its replicas have in common."""
    fields = run.recipe.model_dump(mode="json")
    return {"base": run.start_hash} | {name: fields[name] for name in ("model", "method")}


def serve_rollouts(recipe: Recipe, shard: Shard = Shard(), *, console: Console | None = None) -> None:
    """Generates completions for the run of a recipe until it ends, as one of several replicas, which this may be number
    `shard.index` of. Raises: UserError as a run does, and for a recipe that is not the run's."""
    require_online(recipe, "generates nothing")
    if recipe.rollout is None or not recipe.rollout.replicas:
        fix = "set rollout.replicas=true, here and in the run"
        raise UserError("the run generates by itself", where="rollout.replicas", fix=fix)
    console = console or terminal.console()
    output = pathlib.Path(recipe.output).expanduser()
    folder = output / FOLDER / REPLICAS
    compute = recipe.compute.model_copy(update={"memory_check": False})  # it is of a run that trains
    recipe = recipe.model_copy(update={"resume": False, "overwrite": True, "compute": compute})
    with log_console(console) as log:
        run = set_up_run(recipe, output, console, log, JOB)
        model = load_model(run, console, compute=run.compute, loader=run.data.train)
    changing, params = _changing(model), without_critic(model.parameters)
    current: str | None = None

    def generate_block(request: Request, block: int) -> list[list[Completion]]:
        nonlocal params, current
        if request["weights"] != current:
            params = with_arrays(params, changing, read_weights(folder, request))
            current = request["weights"]
        span = block_spans(request)[block]
        prompts, seeds = request["prompts"][span], request["seeds"][span]
        return generate(
            params,
            model.spec,
            run.compute,
            prompts,
            len(seeds[0]),
            RolloutSection(**request["options"]),
            frozenset(request["stop_ids"]),
            lambda prompt, sample: seeds[prompt][sample],
            request["where"][span],
        )

    console.print(f"replica {shard} generates for {output}", soft_wrap=True)
    for request in requests(folder):
        if request["identity"] != json.loads(json.dumps(_identity(run))):
            fix = "give serve-rollouts the recipe and the overrides of the run"
            raise UserError("the run has another model or method", where="model, method", fix=fix)
        with contextlib.suppress(FileNotFoundError):  # it is complete, and its files are gone
            compute_blocks(folder, request, shard.index - 1, generate_block)


def _rewards(run: LoadedRun, start: int | None, environments: Environments | None) -> Rewards:
    """Loads the rewards of process 0. Raises: UserError for a run that is resumed with others than before."""
    recipe, file = run.recipe, run.output / FOLDER / DIGEST
    max_tokens = recipe.rollout.max_tokens if recipe.rollout else None
    rewards = Rewards(recipe.rewards, max_tokens=max_tokens, environments=environments)
    before = file.read_text() if start and file.is_file() else rewards.digest
    if before != rewards.digest and not recipe.accept_changes:
        rewards.close()
        raise UserError(
            "the rewards are not those the run was started with: their functions, models or options have changed",
            where="rewards",
            fix="put them back, or continue with the new ones: resume=true accept_changes=true",
        )
    if start is not None:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(rewards.digest)
    return rewards


def _reference(run: LoadedRun) -> Callable[[Tree], Tree]:
    """Returns the function from the current parameters to those of the reference model: the base with its adapters
    off, or a copy of the parameters that the run starts from."""
    stage, vision = run.recipe.stage, vision_training(run.recipe)
    is_base = run.method.reference_obstacle is None and not (vision and vision.train)
    if is_base or not (getattr(stage, "beta", 0.0) or getattr(stage, "kl_coef", 0.0)):
        return lambda params: without_adapters(without_critic(params))
    start = jax.jit(lambda tree: jax.tree.map(jax.numpy.copy, tree))(without_critic(run.model.trainable))
    return lambda params: merge(start, run.model.frozen)


def evaluate_online(source: RolloutSource, frozen: Tree, held_out: PromptLoader, trainable: Tree) -> Evaluation:
    """Evaluates by rollouts on held-out prompts; the loss is the mean reward with the other sign."""
    metrics, count = source.evaluate(merge(trainable, frozen), held_out)
    return Evaluation(-metrics["reward"], metrics, float(count))


class OldRollouts:
    """Removes the rollouts that a resumed run does not need, after each save (hooks.SECTIONS)."""

    def __init__(self, run: LoadedRun):
        self._run = run

    def saved(self, trainable: Any, step: int) -> None:
        """Keeps the rollouts from the oldest of the newest checkpoints on, and at least `rollout.keep`."""
        run, rollout, loader = self._run, self._run.recipe.rollout, self._run.data.train
        assert rollout is not None
        assert isinstance(loader, PromptLoader)
        if not run.job.is_main_process:
            return
        steps = [int(path.name) for path in (run.output / CHECKPOINTS).iterdir() if path.name.isdigit()]
        needed = min(sorted({*steps, step})[-run.recipe.checkpoint.keep - 1 :]) // loader.updates
        remove_rollouts(run.output / FOLDER, before=min(needed, step // loader.updates + 1 - (rollout.keep or 0)))

    def close(self) -> None:
        """Does nothing."""


def preview_rewards(recipe: Recipe, *, groups: int = 4, console: Console | None = None) -> Rollout:
    """Prints completions of the first `groups` prompts with their rewards, and how far those tell them apart.

    Writes nothing to the run's output. Raises: UserError as a run does, and for a stage without rewards.
    """
    require_online(recipe, "has no rewards to look at")
    console = console or terminal.console()
    rollout = recipe.rollout.model_copy(update={"prompts": groups, "updates": 1}) if recipe.rollout else None
    count = groups * (rollout.samples if rollout else 1) // STAGES[recipe.stage.kind].unit_segments
    train = recipe.train.model_copy(update={"batch_size": count, "micro_batch": 1})
    recipe = recipe.model_copy(update={"rollout": rollout, "train": train, "resume": False, "overwrite": True})
    with log_console(console) as log:
        run = set_up_run(recipe, pathlib.Path(recipe.output).expanduser(), console, log, JOB)
        loaded, state = load_run(run)
    source = rollout_source(loaded, lambda arrays: place_batch(arrays, loaded.compute.layout, None), None)
    started = time.perf_counter()
    try:
        with console.status("generating"):
            made = source.generate(0, merge(merge(state.trainable, loaded.model.frozen), state.buffers))
        rows = source.rows_of(made)
    finally:
        source.close()
    seconds = time.perf_counter() - started
    print_rollouts(rows, len(rows), console)
    console.print(_table(made, source.reward_names))
    without = made.metrics["frac_reward_zero_std"] * groups
    lines = [f"{amount(len(rows), 'completion')} of {amount(groups, 'prompt')} in {seconds:.1f} s"]
    if without:
        lines.append(f"{round(without)} of {groups} groups have equal rewards: an update learns nothing from them")
    if made.metrics["completions/clipped_ratio"] > 0.5:
        lines.append(
            f"{made.metrics['completions/clipped_ratio']:.0%} of the completions end at rollout.max_tokens, not by "
            "themselves: raise it, or reward short answers"
        )
    for line in lines:
        console.print(Text(line))
    return made


def _table(made: Rollout, names: list[str]) -> Table:
    table = Table(title="rewards", title_justify="left", box=None, pad_edge=False)
    for column in ("", "mean", "deviation", "least", "most", "not applicable"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in zip(names, made.rewards.T, strict=True):
        valid = values[~np.isnan(values)]
        figures = (valid.mean(), valid.std(), valid.min(), valid.max()) if len(valid) else ()
        cells = [f"{figure:.3g}" for figure in figures] or ["-"] * 4
        table.add_row(name, *cells, str(len(values) - len(valid)))
    return table
