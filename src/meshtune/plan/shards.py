"""The sharding of every persistent array of a run, from only the model's config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec

from meshtune.arrays.tree import Tree, merge, named_leaves
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.mesh.config import MeshConfig, resolve_mesh
from meshtune.mesh.layout import Layout, abstract_mesh
from meshtune.model.gather import check_batch, layout_for
from meshtune.model.spec import ModelSpec
from meshtune.optim.build import make_optimizer
from meshtune.setup.choices import Decision, mesh_decisions, mesh_of, optimizer_of, precision_of
from meshtune.setup.coverage import coverage_decisions
from meshtune.setup.machine import local_target, this_machine
from meshtune.setup.search import autotune, merge_decisions
from meshtune.setup.stage import abstract_model, vision_training
from meshtune.setup.start import start_of
from meshtune.train.step.state import abstract_state
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config, stored_dtype


@dataclasses.dataclass(frozen=True)
class Shard:
    """One array: its role, path, global shape, dtype and logical axes, its PartitionSpec and its local shape."""

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
    """All persistent arrays of a run on one mesh. `capacity` is a device's memory in bytes, None if unknown."""

    mesh: MeshConfig
    target: str
    capacity: int | None
    shards: list[Shard]
    decisions: list[Decision]
    model: ModelSpec

    def nbytes(self, *roles: str) -> int:
        """Bytes on one device of the arrays with these roles, by default of all arrays."""
        return sum(shard.nbytes for shard in self.shards if not roles or shard.role in roles)


def shardings_of(recipe: Recipe, target: Target | None) -> Sharding:
    """The shardings of a recipe's arrays on `target`, by default on the devices of this machine.

    Raises: UserError for an invalid model, method or mesh.
    """
    recipe, autotuned = autotune(recipe, target or local_target(this_machine()))
    source = locate(recipe.model.path, recipe.model.revision, allow=CONFIG)
    backend = target.device.backend if target else jax.default_backend()
    devices = target.devices if target else jax.device_count()
    config = load_config(source)
    precision, precision_choice = precision_of(
        recipe, stored_dtype(source, config), backend, target.device.arch if target else "", config
    )
    start = start_of(recipe, source, precision.frozen)
    arrays = abstract_model(recipe, start.method, start.spec, precision.trainable)
    mesh, reason = mesh_of(recipe, devices, arrays.spec)
    resolve_mesh(mesh, devices)
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, notes = layout_for(abstract_mesh(mesh), arrays.spec)
    decisions = mesh_decisions(mesh, reason, notes)
    optimizer, _ = make_optimizer(
        optimizer_of(recipe, precision), recipe.train.steps or 1, arrays.trainable, arrays.spec
    )
    state = abstract_state(arrays.trainable, optimizer, layout, buffers=arrays.buffers)
    shards = [
        *_of_specs("frozen", merge(arrays.frozen, arrays.buffers), layout),
        *_of_specs("trained", arrays.trainable, layout),
        *_of_specs("gradient", optimizer.gradients(arrays.trainable), layout),
        *_of_state(state.opt_state, layout),
    ]
    name = str(target) if target else f"{devices} x {jax.devices()[0].device_kind}"
    coverage = coverage_decisions(start.method, arrays.spec, vision_training(recipe))
    decisions = merge_decisions(autotuned, [*coverage, precision_choice, *decisions])
    return Sharding(mesh, name, target.device.memory if target else None, shards, decisions, arrays.spec)


def _of_specs(role: str, tree: Tree, layout: Layout) -> Iterable[Shard]:
    for path, array in named_leaves(tree):
        sharding = layout.of(array)
        local = sharding.shard_shape(array.shape)
        yield Shard(role, path, array.shape, array.dtype, array.axes, sharding.spec, local)


def _of_state(state: object, layout: Layout) -> Iterable[Shard]:
    for path, leaf in named_leaves(state):
        local = leaf.sharding.shard_shape(leaf.shape)
        yield Shard("optimizer", path, leaf.shape, str(leaf.dtype), (), leaf.sharding.spec, local)
