"""What a recipe comes to before any weight is read: model, method, precision, mesh, and why."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from meshtune.adapters.config import Method
from meshtune.adapters.method import Prepared, abstract
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.families import scored_spec
from meshtune.mesh.axes import resolved
from meshtune.mesh.fit import check_batch
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec
from meshtune.objectives import STAGES
from meshtune.quantize.config import QuantizeConfig
from meshtune.train.devices import Seen, check_devices
from meshtune.train.machine import Machine
from meshtune.train.quantized import quantize_choices, quantize_of
from meshtune.train.resolve import Choice, Precision, layout_of, mesh_of, method_of, precision_of
from meshtune.weights.hub import CONFIG, MODEL, locate
from meshtune.weights.load import load_config, load_spec, stored_dtype


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

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec


def staged(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """The model as the recipe's stage needs it. Raises UserError for a reward model where the next token is learned."""
    scores = STAGES[recipe.stage.kind].scores
    if spec.scored and not scores:
        raise UserError(
            f"this is a reward model: it gives a score, and stage {recipe.stage.kind} learns the next token",
            where="model.path",
            fix="give the causal language model, or use stage: rm",
        )
    return scored_spec(spec) if scores else spec


def settle(
    recipe: Recipe, machine: Machine, seen: Sequence[Seen] = (), *, launcher: str = "none", weights: bool = True
) -> Settled:
    """What a recipe comes to on `machine`. `seen` is what the job's processes see, where they are there to be told.

    Without `weights` the model's config is enough. Raises: UserError for a model that is not there, a method or a mesh
    that cannot be.
    """
    source = locate(recipe.model.path, recipe.model.revision, allow=MODEL if weights else CONFIG)
    method = method_of(recipe)
    precision, chosen = precision_of(recipe, stored_dtype(source, load_config(source)), machine.platform)
    spec = staged(load_spec(source, precision.frozen)[0], recipe)
    quantize = quantize_of(recipe)
    arrays = abstract(method, spec, precision.trainable, quantize)
    mesh, why = mesh_of(recipe, len(machine.devices))
    if seen:
        check_devices(seen, mesh.devices, mesh=str(mesh), launcher=launcher)
    resolved(mesh, len(machine.devices))
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, choices = layout_of(mesh, why, arrays.spec, machine)
    choices = [chosen, *choices, *quantize_choices(arrays, layout)]
    return Settled(source, method, precision, arrays, machine, layout, choices, quantize, tuple(recipe.compute.offload))
