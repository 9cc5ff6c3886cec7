"""How every array of a run lies on a mesh, from the model's config alone: no weights, no devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshtune.adapters.method import abstract
from meshtune.arrays.paths import named_leaves
from meshtune.config.recipe import Recipe
from meshtune.mesh.axes import MeshConfig, abstract_mesh, resolve_mesh
from meshtune.mesh.layout import Layout
from meshtune.model.sharding import check_batch, layout_for
from meshtune.model.spec import ModelSpec
from meshtune.optim.build import make_optimizer
from meshtune.plan.auto import merged, settled_autos, target_here
from meshtune.plan.hardware import Target
from meshtune.setup.choices import Choice, mesh_choices, mesh_of, optimizer_of, precision_of
from meshtune.setup.machine import this_machine
from meshtune.setup.start import start_of
from meshtune.train.step.build import abstract_state
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config, stored_dtype


@dataclasses.dataclass(frozen=True)
class Shard:
    """One array: what it is for, its path, shape, dtype and logical axes, and how it is split."""

    role: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    spec: PartitionSpec
    local: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.local) * jax.numpy.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Sharding:
    """All arrays that a run keeps while it updates, on one mesh. `capacity` is a device's memory in bytes, or None."""

    mesh: MeshConfig
    target: str
    capacity: int | None
    shards: list[Shard]
    choices: list[Choice]
    model: ModelSpec

    def nbytes(self, *roles: str) -> int:
        """Bytes on one device of the arrays with these roles; of all without any."""
        return sum(shard.nbytes for shard in self.shards if not roles or shard.role in roles)


def shardings_of(recipe: Recipe, target: Target | None) -> Sharding:
    """How a recipe's arrays lie on `target`, or on the devices of this machine.

    Raises UserError for whatever is wrong with the model, the method or the mesh.
    """
    recipe, found = settled_autos(recipe, target or target_here(this_machine()))
    source = locate(recipe.model.path, recipe.model.revision, allow=CONFIG)
    backend = target.device.backend if target else jax.default_backend()
    devices = target.devices if target else jax.device_count()
    precision, chosen = precision_of(recipe, stored_dtype(source, load_config(source)), backend)
    start = start_of(recipe, source, precision.frozen)
    arrays = abstract(start.method, start.spec, precision.trainable)
    mesh, why = mesh_of(recipe, devices)
    resolve_mesh(mesh, devices)
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, notes = layout_for(abstract_mesh(mesh), arrays.spec)
    choices = mesh_choices(mesh, why, notes)
    optimizer, _ = make_optimizer(
        optimizer_of(recipe, precision), recipe.train.steps or 1, arrays.trainable, arrays.spec
    )
    state = abstract_state(arrays.trainable, optimizer, layout)
    shards = [
        *_of_specs("frozen", arrays.frozen, layout),
        *_of_specs("trained", arrays.trainable, layout),
        *_of_specs("gradient", optimizer.gradients(arrays.trainable), layout),
        *_of_state(state.opt_state, layout),
    ]
    name = str(target) if target else f"{devices} x {jax.devices()[0].device_kind}"
    return Sharding(
        mesh, name, target.device.memory if target else None, shards, merged(found, [chosen, *choices]), arrays.spec
    )


def _of_specs(role: str, tree: Any, layout: Layout) -> Iterable[Shard]:
    for path, array in named_leaves(tree):
        sharding = layout.of(array)
        local = sharding.shard_shape(array.shape)
        yield Shard(role, path, array.shape, array.dtype, array.axes, sharding.spec, local)


def _of_state(state: Any, layout: Layout) -> Iterable[Shard]:
    for path, leaf in named_leaves(state):
        local = leaf.sharding.shard_shape(leaf.shape)
        yield Shard("optimizer", path, leaf.shape, str(leaf.dtype), (), leaf.sharding.spec, local)
