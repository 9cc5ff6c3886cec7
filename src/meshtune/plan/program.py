"""The step `train` would run, and all it is called with in the abstract: no weights, no data, no devices here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshtune.config.recipe import Recipe
from meshtune.mesh.axes import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import is_on_host
from meshtune.model.compute import Compute
from meshtune.model.sharding import check_batch
from meshtune.plan.auto import merged, settled_autos, target_here
from meshtune.plan.hardware import Target
from meshtune.setup.assemble import batch_like, frozen_like, optimizer_for, state_like, step_for
from meshtune.setup.choices import Choice, compute_of
from meshtune.setup.machine import Machine, this_machine
from meshtune.setup.resolved import Settled, settle
from meshtune.setup.stage import row_length
from meshtune.train.step.build import TrainState

STEPS = 1000  # of a recipe that counts in epochs: a constant of the learning rate's schedule, nothing else


@dataclasses.dataclass(frozen=True)
class Program:
    """`step` is train's own jitted function; `arguments` what it is called with: state, frozen weights, batch, seed.

    `rows` and `length` are of one micro-batch over all devices, `accumulation` the micro-batches of a step.
    """

    step: Any
    arguments: tuple[TrainState, Any, Any, Any]
    settled: Settled
    compute: Compute
    choices: list[Choice]
    rows: int
    length: int
    accumulation: int
    steps: int

    @property
    def layout(self) -> Layout | None:
        return self.settled.layout

    @property
    def mesh(self) -> dict[str, int]:
        """Devices along each axis."""
        return MeshConfig().sizes if self.layout is None else dict(self.layout.mesh.shape)

    def lower(self) -> Any:
        """The traced step, ready for `.compile()`."""
        return self.step.lower(*self.arguments)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Bytes of the arguments on one device and in the host's memory for it, by what they are for."""
        state, frozen, batch, _ = self.arguments
        parts = {"frozen": frozen, "trained": state.trainable, "optimizer": state.opt_state, "batch": batch}
        return {role: _bytes_by_place(tree) for role, tree in parts.items()}


def step_of(
    recipe: Recipe, target: Target | None = None, devices: Sequence[Any] | None = None, length: int | None = None
) -> Program:
    """The step of a recipe for the `devices` that describe `target`, or for those of this process without one.

    `length` is that of a row; data.max_length by default, which is exact for packed rows and the most for padded ones.
    Raises: UserError for whatever is wrong with the model, the method, the mesh or a forced choice.
    """
    machine = (
        this_machine() if target is None else Machine(target.device.platform, tuple(devices or ()), target.device.arch)
    )
    assert machine.devices, f"no devices that describe {target}"
    recipe, found = settled_autos(recipe, target or target_here(machine))
    settled = settle(recipe, machine, weights=False)
    accumulation = recipe.train.accumulation
    rows, length = recipe.train.batch_size // accumulation, length or row_length(recipe)
    if settled.layout is not None:
        check_batch(MeshConfig(**settled.layout.mesh.shape), rows, length)
    compute, choices = compute_of(recipe, settled.spec, settled.precision, rows, length, settled.layout, machine)
    steps = recipe.train.steps or STEPS
    optimizer, _ = optimizer_for(recipe, settled, steps)
    arguments = (
        state_like(settled, optimizer),
        frozen_like(settled),
        batch_like(recipe, settled, (accumulation, rows, length)),
        jax.ShapeDtypeStruct((), np.dtype("int32")),
    )
    if target is not None and settled.layout is None:
        # A step for one device is told by where its arguments lie which device that is.
        arguments = jax.tree.map(lambda leaf: _on(leaf, machine.devices[0]), arguments)
    step = step_for(recipe, settled, compute, optimizer)
    choices = merged(found, [*settled.choices, *choices])
    return Program(step, arguments, settled, compute, choices, rows, length, accumulation, steps)


def _on(leaf: jax.ShapeDtypeStruct, device: Any) -> jax.ShapeDtypeStruct:
    if is_on_host(leaf.sharding):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))


def _bytes_by_place(tree: Any) -> dict[str, int]:
    found = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves(tree):
        local = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        kind = getattr(leaf.sharding, "memory_kind", None) or "device"
        found["host" if "host" in kind else "device"] += math.prod(local) * leaf.dtype.itemsize
    return found
