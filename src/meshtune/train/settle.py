"""What a recipe comes to before any weight is read: model, method, precision, mesh, and why."""

from __future__ import annotations

import dataclasses
import pathlib

import jax

from meshtune.adapters.config import Method
from meshtune.adapters.method import Prepared, abstract
from meshtune.config.recipe import Recipe
from meshtune.mesh.fit import check_batch
from meshtune.mesh.layout import Layout
from meshtune.mesh.processes import Job
from meshtune.model.spec import ModelSpec
from meshtune.train.devices import Seen, check_devices
from meshtune.train.resolve import Choice, Precision, layout_of, mesh_of, method_of, precision_of
from meshtune.weights.hub import locate
from meshtune.weights.load import load_config, load_spec, stored_dtype


@dataclasses.dataclass(frozen=True)
class Settled:
    """`arrays` is the model as the method splits it, with ArraySpecs for arrays and the spec that fits it."""

    source: pathlib.Path
    method: Method
    precision: Precision
    arrays: Prepared
    layout: Layout | None
    choices: list[Choice]

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec


def settle(recipe: Recipe, job: Job, seen: list[Seen]) -> Settled:
    """Raises: UserError for a model that is not there, a method or a mesh that cannot be."""
    source = locate(recipe.model.path, recipe.model.revision)
    method = method_of(recipe)
    precision, chosen = precision_of(recipe, stored_dtype(source, load_config(source)))
    spec, _ = load_spec(source, precision.frozen)
    arrays = abstract(method, spec, precision.trainable)
    mesh, why = mesh_of(recipe, spec, jax.device_count())
    check_devices(seen, mesh.devices, mesh=str(mesh), launcher=job.place.launcher)
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, choices = layout_of(mesh, why, arrays.spec)
    return Settled(source, method, precision, arrays, layout, [chosen, *choices])
