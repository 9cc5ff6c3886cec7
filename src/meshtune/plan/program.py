"""Builds the jitted step that `train` runs, with abstract arguments: no weights, data or accelerators are needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Lowered, Wrapped

from meshtune.arrays.tree import Tree
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import is_offloaded
from meshtune.model.compute import Compute
from meshtune.model.sharding import check_batch
from meshtune.setup.choices import Decision, compute_of
from meshtune.setup.machine import Machine, local_target, this_machine
from meshtune.setup.run import Run, resolve_run
from meshtune.setup.search import autotune, merge_decisions
from meshtune.setup.stage import row_length
from meshtune.train.assemble import batch_like, frozen_like, optimizer_for, state_like, step_for
from meshtune.train.step.state import TrainState

DEFAULT_STEPS = 1000  # for a recipe in epochs; only a constant of the learning-rate schedule depends on it


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and its abstract arguments.

    `step` is the function that `train` jits; `arguments` are its state, frozen weights, batch and seed. `rows` and
    `length` are those of one micro-batch over all devices, `accumulation` the number of micro-batches of a step.
    """

    step: Wrapped
    arguments: tuple[TrainState, Tree, Tree, jax.ShapeDtypeStruct]
    run: Run
    compute: Compute
    decisions: list[Decision]
    rows: int
    length: int
    accumulation: int
    steps: int

    @property
    def layout(self) -> Layout | None:
        return self.run.layout

    @property
    def mesh(self) -> dict[str, int]:
        """The number of devices along each mesh axis."""
        return MeshConfig().sizes if self.layout is None else dict(self.layout.mesh.shape)

    def lower(self) -> Lowered:
        """Traces and lowers the step; the result has `.compile()`."""
        return self.step.lower(*self.arguments)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Bytes of the arguments by role, on one device and in host memory for that device."""
        state, frozen, batch, _ = self.arguments
        parts = {
            "frozen": (frozen, state.buffers),
            "trained": state.trainable,
            "optimizer": state.opt_state,
            "batch": batch,
        }
        return {role: _bytes_by_memory(tree) for role, tree in parts.items()}


def step_of(
    recipe: Recipe, target: Target | None = None, devices: Sequence[jax.Device] | None = None, length: int | None = None
) -> Program:
    """Builds the step of a recipe for the described `devices` of `target`, or for this process's without a target.

    `length` is that of a row, by default data.max_length: exact for packed rows, an upper bound for padded ones.
    Raises: UserError for an invalid model, method or mesh, or for a forced choice that is impossible.
    """
    if target is None:
        machine = this_machine()
    else:
        machine = Machine(target.device.platform, tuple(devices or ()), target.device.arch)
    assert machine.devices, f"no devices that describe {target}"
    recipe, autotuned = autotune(recipe, target or local_target(machine))
    run = resolve_run(recipe, machine, weights=False)
    accumulation = recipe.train.accumulation
    length = length or row_length(recipe)
    if run.layout is not None:
        check_batch(MeshConfig(**run.layout.mesh.shape), run.rows, length)
    compute, decisions = compute_of(recipe, run.spec, run.precision, run.rows, length, run.layout, machine)
    steps = recipe.train.steps or DEFAULT_STEPS
    optimizer, _ = optimizer_for(run, steps)
    arguments = (
        state_like(run, optimizer),
        frozen_like(run),
        batch_like(run, (accumulation, run.rows, length)),
        jax.ShapeDtypeStruct((), np.dtype("int32")),
    )
    if target is not None and run.layout is None:
        # Without a mesh, the shardings of its arguments alone tell the compiler which device the step is for.
        arguments = jax.tree.map(lambda leaf: _on(leaf, machine.devices[0]), arguments)
    step = step_for(run, compute, optimizer)
    decisions = merge_decisions(autotuned, [*run.decisions, *decisions])
    return Program(step, arguments, run, compute, decisions, run.rows, length, accumulation, steps)


def _on(leaf: jax.ShapeDtypeStruct, device: jax.Device) -> jax.ShapeDtypeStruct:
    if is_offloaded(leaf.sharding):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))


def _bytes_by_memory(tree: object) -> dict[str, int]:
    """Bytes of a tree of abstract arrays on one device, by memory: device or host."""
    sizes = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves(tree):
        local = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        kind = getattr(leaf.sharding, "memory_kind", None) or "device"
        sizes["host" if "host" in kind else "device"] += math.prod(local) * leaf.dtype.itemsize
    return sizes
