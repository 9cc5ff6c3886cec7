"""Resolves a recipe into a concrete run configuration, with the reason for each automatic choice, without weights."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from meshtune.adapters.method import PreparedModel, abstract
from meshtune.adapters.training_method import Method
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.mesh.config import resolve_mesh
from meshtune.mesh.layout import Layout
from meshtune.model.config import OffloadName
from meshtune.model.sharding import check_batch
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.setup.choices import Decision, Precision, layout_of, mesh_of, precision_of
from meshtune.setup.coverage import coverage_decisions
from meshtune.setup.devices import ProcessDevices, check_devices
from meshtune.setup.machine import Machine
from meshtune.setup.quantization import quantize_decisions
from meshtune.setup.start import Start, start_of
from meshtune.weights.hub import CONFIG, MODEL, locate
from meshtune.weights.load import load_config, stored_dtype
from meshtune.weights.passed_through import notes as passing_notes


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A recipe's concrete model, method, precision and mesh.

    `arrays` is the model as the method splits it, with ArraySpecs for arrays, and the spec that fits it. `decisions`
    are the automatic choices, for the banner.
    """

    source: pathlib.Path
    method: Method
    precision: Precision
    arrays: PreparedModel
    machine: Machine
    layout: Layout | None
    decisions: list[Decision]
    quantize: QuantizeConfig | None
    offload: tuple[OffloadName, ...]
    start: Start | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec


def resolve_run(
    recipe: Recipe,
    machine: Machine,
    processes: Sequence[ProcessDevices] = (),
    *,
    launcher: str = "none",
    weights: bool = True,
) -> ResolvedRun:
    """Resolves a recipe for `machine`; `processes` are the devices of the job's processes, to compare with the mesh.

    Without `weights` the model's config is enough. Raises: UserError for a model that does not exist, or a method or
    mesh that is impossible.
    """
    source = locate(recipe.model.path, recipe.model.revision, allow=MODEL if weights else CONFIG)
    precision, decision = precision_of(recipe, stored_dtype(source, load_config(source)), machine.platform)
    start = start_of(recipe, source, precision.frozen)
    _check_length(recipe.data.max_length, start.spec)
    quantize = _asked(recipe.quantize, start.spec)
    arrays = abstract(start.method, start.spec, precision.trainable, quantize)
    mesh, why = mesh_of(recipe, len(machine.devices), arrays.spec)
    if processes:
        check_devices(processes, mesh.devices, mesh=str(mesh), launcher=launcher)
    resolve_mesh(mesh, len(machine.devices))
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, decisions = layout_of(mesh, why, arrays.spec, machine)
    notes = [Decision("model", arrays.spec.family, note) for note in arrays.spec.notes]
    notes += [Decision("model", *note) for note in passing_notes(source, start.spec)]
    coverage = coverage_decisions(start.method, arrays.spec)
    decisions = [*notes, *coverage, decision, *decisions, *quantize_decisions(arrays, layout, quantize)]
    offload = recipe.compute.offload
    return ResolvedRun(source, start.method, precision, arrays, machine, layout, decisions, quantize, offload, start)


def _asked(quantize: QuantizeConfig | None, spec: ModelSpec) -> QuantizeConfig | None:
    """The quantisation that a recipe asks for: "none" changes nothing where a checkpoint is not published quantised."""
    return quantize if quantize is not None and (quantize.quantises or spec.published is not None) else None


def _check_length(length: int, spec: ModelSpec) -> None:
    """Raises: UserError for documents of more tokens than a model with learned positions has positions."""
    if spec.learned_positions and length > spec.max_length:
        raise UserError(
            f"documents of up to {length} tokens need as many positions, and this {spec.family} has learned "
            f"{spec.max_length}",
            where="data.max_length",
            fix=f"set data.max_length to {spec.max_length} or less",
        )
