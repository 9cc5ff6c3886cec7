"""Builds the step, the optimizer, the weights and the state of a run, and their abstract forms for planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from rich.console import Console

from meshtune.adapters.kind import Original
from meshtune.adapters.method import PreparedModel, held_weight, prepare
from meshtune.arrays.batch import batch_axes
from meshtune.arrays.tree import Tree, flatten
from meshtune.data.loader import Loader
from meshtune.errors import UserError
from meshtune.kernels.attention import zigzag_order
from meshtune.lazy import LazyFunction
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import (
    is_table,
    offload_arrays,
    offload_frozen,
    offloaded_names,
    place_batch,
    shardings,
)
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.compute import Compute
from meshtune.model.spec import abstract_params
from meshtune.objectives.answers import CRITIC, without_critic
from meshtune.objectives.config import TEACHER
from meshtune.optim.build import make_optimizer
from meshtune.optim.optimizer import Optimizer, Schedule
from meshtune.setup.choices import optimizer_of
from meshtune.setup.memory import size_in_words
from meshtune.setup.run import Run
from meshtune.setup.stage import batch_arrays, draws, objective_of, vision_training
from meshtune.train.run_setup import PreparedRun
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import TrainState, abstract_state, init_state
from meshtune.weights.load import LoadReport, load_params, load_weight, with_score

if TYPE_CHECKING:
    from meshtune.data.prompts import PromptLoader
    from meshtune.data.stream import Stream
    from meshtune.setup.teacher import Teacher

start_critic = LazyFunction("meshtune.objectives.critic:start_critic")
input_sizes = LazyFunction("meshtune.adapters.inputs:input_sizes")
resume_adapter = LazyFunction("meshtune.adapters.continued:resume_adapter")


def optimizer_for(run: Run, steps: int) -> tuple[Optimizer, Schedule]:
    """Builds the optimizer and the learning-rate schedule of a run of `steps` updates."""
    return make_optimizer(optimizer_of(run.recipe, run.precision), steps, run.arrays.trainable, run.spec)


def step_for(run: Run, compute: Compute, optimizer: Optimizer) -> jax.stages.Wrapped:
    """Builds the jitted train step (train.step.build.make_train_step)."""
    return make_train_step(
        objective_of(run.recipe, run.teacher and run.teacher.spec),
        run.spec,
        compute,
        optimizer,
        max_grad_norm=run.recipe.optimizer.max_grad_norm,
        dropout=draws(run.recipe, run.method),
        abstract=run.arrays.trainable,
        buffers=run.arrays.buffers,
    )


def state_like(run: Run, optimizer: Optimizer) -> TrainState:
    """Returns the training state as ShapeDtypeStructs, with shardings if the run has a layout.

    Raises: UserError if the recipe offloads an optimizer state that cannot be updated layer by layer.
    """
    if "optimizer" in run.offload and optimizer.update_param is None:
        raise UserError(
            "this optimizer looks at all gradients at once, so its state cannot be brought layer by layer",
            where="optimizer.name, compute.offload",
            fix="leave optimizer out of compute.offload, or use adamw, whose state can wait in the host's memory",
        )
    arrays = run.arrays
    dtype = run.precision.compute
    return abstract_state(arrays.trainable, optimizer, run.layout, run.offload, arrays.buffers, dtype)


def frozen_like(run: Run) -> Tree:
    """Returns the frozen weights as ShapeDtypeStructs, with shardings if the run has a layout.

    Raises: UserError if the recipe offloads tables and all of them are trained.
    """
    frozen = run.arrays.frozen | ({} if run.teacher is None else {TEACHER: run.teacher.parameters})
    if run.layout is None:
        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), frozen)
    else:
        like = jax.tree.map(
            lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
            frozen,
            shardings(frozen, run.layout),
        )
    if "tables" in run.offload and not any(is_table(leaf) for leaf in jax.tree.leaves(frozen)):
        raise UserError(
            "this method trains the embedding and the output head, and trained tables stay on the device",
            where="compute.offload",
            fix="leave tables out, or train neither",
        )
    return offload_frozen(like, frozen, run.offload)


def waiting_weights(run: Run, optimizer: Optimizer) -> list[str]:
    """Returns the paths of all frozen and trained weights that are offloaded to host memory."""
    return offloaded_names(frozen_like(run)) + offloaded_names(state_like(run, optimizer).trainable)


def batch_like(run: Run, shape: tuple[int, int, int], *, shared_prompts: bool = False) -> Tree:
    """Returns a batch [micro-batches, rows, positions] of the recipe's stage as ShapeDtypeStructs.

    Its shardings are those of mesh.placement.place_batch.
    """
    layout = run.layout
    arrays = batch_arrays(run.recipe, run.method, run.spec, shape, shared_prompts=shared_prompts)
    return {
        name: jax.ShapeDtypeStruct(
            size, dtype, sharding=None if layout is None else layout.sharding(batch_axes(name, len(size)), size)
        )
        for name, (size, dtype) in arrays.items()
    }


CALIBRATED = 2048  # tokens per row at most: calibration does not chunk longer rows


@dataclasses.dataclass(frozen=True)
class LoadedRun(PreparedRun):
    """A run with its weights: the third stage. `model.trainable` are the initial values of the trained arrays.

    `frozen` is what the step is given: the model's frozen arrays, and those of the teacher of a distillation.
    """

    model: PreparedModel
    optimizer: Optimizer
    schedule: Schedule
    frozen: Tree


def load_run(run: PreparedRun) -> tuple[LoadedRun, TrainState]:
    """Loads the base and creates the initial state. Collective: all processes of the job call this."""
    optimizer, schedule = optimizer_for(run, run.total_steps)
    model = load_model(
        run,
        run.console,
        run.job,
        group=run.processes_per_host,
        waiting=waiting_weights(run, optimizer),
        compute=run.compute,
        loader=run.data.train,
    )
    like = None if run.layout is None and not run.offload else state_like(run, optimizer)
    if like is not None and not {"weights", "tables"}.isdisjoint(run.offload):
        trainable = offload_arrays(model.trainable, like.trainable)
        waiting = {name: node for name, node in frozen_like(run).items() if name != TEACHER}
        model = dataclasses.replace(model, trainable=trainable, frozen=offload_arrays(model.frozen, waiting))
    state = init_state(model.trainable, optimizer, like, model.buffers, run.precision.compute)
    frozen = model.frozen
    if run.teacher is not None:
        frozen = frozen | {TEACHER: _load_teacher(run, run.teacher)}
    return LoadedRun(**vars(run), model=model, optimizer=optimizer, schedule=schedule, frozen=frozen), state


def _load_teacher(run: PreparedRun, teacher: Teacher) -> Tree:
    with run.console.status("loading the teacher"):
        params = teacher.load(run.layout)
    run.console.print(f"[bold]loaded[/] the teacher, {teacher.path}", highlight=False)
    return offload_arrays(params, frozen_like(run)[TEACHER]) if run.offload else params


def load_model(
    run: Run,
    console: Console,
    job: Job = SINGLE_PROCESS,
    *,
    group: int = 1,
    waiting: Sequence[str] = (),
    compute: Compute | None = None,
    loader: Loader | Stream | PromptLoader | None = None,
) -> PreparedModel:
    """Loads the base and splits it into trained and frozen arrays. Collective.

    The `group` processes of a host share the reading of each file. Weights whose paths are `waiting` stay in the host's
    memory. Methods with calibration measure the inputs of weights on rows of `loader`, computed as `compute` says.
    """
    model = _load_policy(run, console, job, group, waiting, compute, loader)
    critic = run.arrays.trainable.get(CRITIC)
    return model if critic is None else start_critic(model, critic, run.layout)


def _load_policy(
    run: Run,
    console: Console,
    job: Job,
    group: int,
    waiting: Sequence[str],
    compute: Compute | None,
    loader: Loader | Stream | PromptLoader | None,
) -> PreparedModel:
    params = with_score(_load_base(run, console, job, group, waiting), run.spec, run.layout)
    continued = getattr(run.method, "continued", None)
    if continued is not None:
        arrays = dataclasses.replace(run.arrays, trainable=without_critic(run.arrays.trainable))
        return resume_adapter(continued, arrays, run.spec, params, run.layout)
    sizes: dict[str, jax.Array] = {}
    if run.method.calibration_rows:
        assert compute is not None
        assert loader is not None
        if run.recipe.rollout is not None:
            raise UserError(
                "this initialisation of adapters is measured on rows of training data, and an online stage has none "
                "before it trains",
                where="method.init",
                fix="use another initialisation, or tune on conversations first and continue the adapter",
            )
        with console.status(f"measuring the inputs of weights on {run.method.calibration_rows} rows"):
            sizes = _measure_inputs(run, params, compute, loader)  # pyright: ignore[reportArgumentType]

    def original(path: str) -> Original:
        return Original(load_weight(run.source, run.spec, path, run.layout), sizes.get(path))

    key = jax.random.fold_in(jax.random.key(run.recipe.seed), 0)
    vision = vision_training(run.recipe)
    return prepare(run.method, run.spec, params, key, run.precision.trainable, run.layout, original, vision=vision)


def _load_base(run: Run, console: Console, job: Job, group: int, waiting: Sequence[str]) -> Tree:
    reports: list[LoadReport] = []
    with console.status("loading weights") as status:
        params = load_params(
            run.source,
            run.spec,
            layout=run.layout,
            quantize=run.quantize,
            broadcast=run.recipe.model.load == "broadcast" and run.layout is not None,
            replicas=run.recipe.model.load == "replica",
            group=group,
            waiting=list(waiting),
            plain=flatten(run.arrays.trainable),
            progress=lambda done, of: status.update(f"loading weights: {size_in_words(done)} of {size_in_words(of)}"),
            report=reports.append,
        )
    for line in job.gather("loading", reports[0].line):
        text = line.partition(": ")[2] if job.process_count == 1 else line
        console.print(f"[bold]loaded[/] {text}", highlight=False)
    return params


def _measure_inputs(run: Run, params: Tree, compute: Compute, loader: Loader | Stream) -> dict[str, jax.Array]:
    """Measures the input magnitudes of every adapted weight, by path."""
    forms = flatten(abstract_params(run.spec))
    adapted = [path.rpartition("/") for path in flatten(without_critic(run.arrays.trainable))]
    paths = {node: held_weight(node, run.spec) for node, _, last in adapted if last == "adapter"}
    nodes = {node: forms[path] for node, path in paths.items()}
    rows = _calibration_rows(loader, compute.layout, run.method.calibration_rows)
    return {paths[node]: size for node, size in input_sizes(nodes, params, run.spec, compute, rows).items()}


def _calibration_rows(loader: Loader | Stream, layout: Layout | None, count: int) -> Iterator[Tree]:
    """Yields the first `count` rows of the training data in micro-batches, placed on the devices."""
    cp = 1 if layout is None else layout.size("cp")
    length = min(loader.row_length, CALIBRATED // (2 * cp) * (2 * cp))
    order = zigzag_order(length, cp) if cp > 1 else None
    step = 0
    while count > 0:
        arrays = {
            name: array[..., :length]
            for name, array in loader.batch(step).arrays.items()
            if name in ("tokens", "positions", "segment_ids")
        }
        step += 1
        for micro in range(arrays["tokens"].shape[0]):
            if count > 0:
                count -= arrays["tokens"].shape[1]
                yield place_batch({name: np.asarray(x[micro]) for name, x in arrays.items()}, layout, order)
