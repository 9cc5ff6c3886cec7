"""Initialises a run: loads the base weights, adds adapters, and creates the training state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from rich.console import Console

from meshtune.adapters.continued import resume_adapter
from meshtune.adapters.inputs import input_sizes
from meshtune.adapters.kind import Original
from meshtune.adapters.method import PreparedModel, held_weight, prepare
from meshtune.arrays.tree import Tree, flatten
from meshtune.config.recipe import Recipe
from meshtune.data.prepare import PreparedData
from meshtune.kernels.attention import zigzag_order
from meshtune.mesh.placement import offload_arrays, place_batch
from meshtune.mesh.processes import Job
from meshtune.model.compute import Compute
from meshtune.model.spec import abstract_params
from meshtune.optim.optimizer import Optimizer, Schedule
from meshtune.setup.assemble import frozen_like, optimizer_for, state_like, waiting_weights
from meshtune.setup.memory import size_in_words
from meshtune.setup.resolved import ResolvedRun
from meshtune.train.step.state import TrainState, init_state
from meshtune.weights.load import load_params, load_weight, with_score
from meshtune.weights.load_report import LoadReport

CALIBRATED = 2048  # tokens per row at most: calibration does not chunk longer rows


@dataclasses.dataclass(frozen=True)
class InitializedRun:
    """The prepared model, its initial training state, its optimizer and the learning-rate schedule."""

    model: PreparedModel
    state: TrainState
    optimizer: Optimizer
    schedule: Schedule


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Creates a run's parameters. The `processes_a_host` processes of a host share the reading of each file.
    `data` may be None for methods without calibration."""

    recipe: Recipe
    resolved: ResolvedRun
    compute: Compute
    data: PreparedData | None
    total: int
    job: Job
    processes_a_host: int
    console: Console

    def initialize(self) -> InitializedRun:
        """Loads the base and creates the initial state. Collective: all processes of the job call this."""
        resolved = self.resolved
        optimizer, schedule = optimizer_for(self.recipe, resolved, self.total)
        model = self.prepared(waiting_weights(resolved, optimizer))
        like = None if resolved.layout is None and not resolved.offload else state_like(resolved, optimizer)
        if like is not None and not {"weights", "tables"}.isdisjoint(resolved.offload):
            trainable = offload_arrays(model.trainable, like.trainable)
            frozen = offload_arrays(model.frozen, frozen_like(resolved))
            model = dataclasses.replace(model, trainable=trainable, frozen=frozen)
        state = init_state(model.trainable, optimizer, like, model.buffers)
        return InitializedRun(model, state, optimizer, schedule)

    def prepared(self, waiting: Sequence[str] = ()) -> PreparedModel:
        """Loads the base and splits it into what is trained and what is not. Weights that are `waiting` in the host's
        memory are left there. Collective."""
        resolved = self.resolved
        params = with_score(self._loaded(list(waiting)), resolved.spec, resolved.layout)
        goes_on = getattr(resolved.method, "continued", None)
        if goes_on is None:
            return self._split(params)
        return resume_adapter(goes_on, resolved.arrays, resolved.spec, params, resolved.layout)

    def _loaded(self, waiting: list[str]) -> Tree:
        resolved = self.resolved
        reports: list[LoadReport] = []
        with self.console.status("loading weights") as status:
            params = load_params(
                resolved.source,
                resolved.spec,
                layout=resolved.layout,
                quantize=resolved.quantize,
                broadcast=self.recipe.model.load == "broadcast" and resolved.layout is not None,
                group=self.processes_a_host,
                waiting=waiting,
                plain=flatten(resolved.arrays.trainable),
                progress=lambda done, of: status.update(
                    f"loading weights: {size_in_words(done)} of {size_in_words(of)}"
                ),
                report=reports.append,
            )
        for line in self.job.exchange("loading", reports[0].line):
            single_process = self.job.process_count == 1
            self.console.print(
                f"[bold]loaded[/] {line.partition(': ')[2] if single_process else line}", highlight=False
            )
        return params

    def _split(self, params: Tree) -> PreparedModel:
        resolved = self.resolved
        sizes = self._sizes(params)

        def original(path: str) -> Original:
            return Original(load_weight(resolved.source, resolved.spec, path, resolved.layout), sizes.get(path))

        key = jax.random.fold_in(jax.random.key(self.recipe.seed), 0)
        return prepare(
            resolved.method, resolved.spec, params, key, resolved.precision.trainable, resolved.layout, original
        )

    def _sizes(self, params: Tree) -> dict[str, jax.Array]:
        """Measures the input magnitudes of every adapted weight, by path; {} for methods without calibration."""
        resolved = self.resolved
        rows = resolved.method.calibration_rows
        if not rows:
            return {}
        forms = flatten(abstract_params(resolved.spec))
        adapted = [path.rpartition("/") for path in flatten(resolved.arrays.trainable)]
        paths = {node: held_weight(node, resolved.spec) for node, _, last in adapted if last == "adapter"}
        with self.console.status(f"measuring the inputs of weights on {rows} rows"):
            nodes = {node: forms[path] for node, path in paths.items()}
            input_norms = input_sizes(nodes, params, resolved.spec, self.compute, self._rows(rows))
        return {paths[node]: size for node, size in input_norms.items()}

    def _rows(self, count: int) -> Iterator[Tree]:
        """Yields the first `count` rows of the training data in micro-batches, placed on the devices."""
        assert self.data is not None
        layout, loader = self.compute.layout, self.data.train
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
