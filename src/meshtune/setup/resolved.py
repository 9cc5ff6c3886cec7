"""What a recipe comes to before any weight is read: model, method, precision, mesh, and why."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from meshtune.adapters.config import Method
from meshtune.adapters.method import Prepared, abstract
from meshtune.config.recipe import Recipe
from meshtune.mesh.axes import resolve_mesh
from meshtune.mesh.layout import Layout
from meshtune.model.sharding import check_batch
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.setup.choices import Choice, Precision, layout_of, mesh_of, precision_of
from meshtune.setup.devices import Seen, check_devices
from meshtune.setup.machine import Machine
from meshtune.setup.quantization import quantize_choices, quantize_of
from meshtune.setup.start import Start, start_of
from meshtune.weights.hub import CONFIG, MODEL, locate
from meshtune.weights.load import load_config, stored_dtype


@dataclasses.dataclass(frozen=True)
class Settled:
    """`arrays` is the model as the method splits it, with ArraySpecs for arrays and the spec that fits it."""

    source: pathlib.Path
    method: Method
    precision: Precision
    arrays: Prepared
    machine: Machine
    layout: Layout | None
    choices: list[Choice]
    quantize: QuantizeConfig | None = None
    offload: tuple[str, ...] = ()
    start: Start | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec


def settle(
    recipe: Recipe, machine: Machine, seen: Sequence[Seen] = (), *, launcher: str = "none", weights: bool = True
) -> Settled:
    """What a recipe comes to on `machine`. `seen` is what the job's processes see, where they are there to be told.

    Without `weights` the model's config is enough. Raises: UserError for a model that is not there, a method or a mesh
    that cannot be.
    """
    source = locate(recipe.model.path, recipe.model.revision, allow=MODEL if weights else CONFIG)
    precision, chosen = precision_of(recipe, stored_dtype(source, load_config(source)), machine.platform)
    start = start_of(recipe, source, precision.frozen)
    quantize = quantize_of(recipe)
    arrays = abstract(start.method, start.spec, precision.trainable, quantize)
    mesh, why = mesh_of(recipe, len(machine.devices))
    if seen:
        check_devices(seen, mesh.devices, mesh=str(mesh), launcher=launcher)
    resolve_mesh(mesh, len(machine.devices))
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, choices = layout_of(mesh, why, arrays.spec, machine)
    choices = [chosen, *choices, *quantize_choices(arrays, layout)]
    offload = tuple(recipe.compute.offload)
    return Settled(source, start.method, precision, arrays, machine, layout, choices, quantize, offload, start)
