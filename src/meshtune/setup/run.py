"""Resolves a recipe into a concrete run configuration, with the reason for each automatic choice, without weights."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtune.adapters.method import PreparedModel
from meshtune.adapters.training_method import Method
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.mesh.config import MeshConfig, resolve_mesh
from meshtune.mesh.layout import Layout
from meshtune.model.compute import OffloadName, Precision
from meshtune.model.gather import check_batch
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import CRITIC
from meshtune.quantize.config import QuantizeConfig
from meshtune.setup.choices import Decision, layout_of, mesh_of, precision_of
from meshtune.setup.coverage import coverage_decisions, quantize_decisions
from meshtune.setup.machine import Machine
from meshtune.setup.stage import abstract_model, vision_training
from meshtune.setup.start import Start, start_of
from meshtune.weights.hub import CONFIG, MODEL, locate
from meshtune.weights.load import load_config, stored_dtype
from meshtune.weights.passed_through import notes as passing_notes

if TYPE_CHECKING:
    from meshtune.setup.teacher import Teacher

teacher_of = LazyFunction("meshtune.setup.teacher:teacher_of")
with_teacher_axes = LazyFunction("meshtune.setup.teacher:with_teacher_axes")


@dataclasses.dataclass(frozen=True)
class Run:
    """A recipe resolved for a machine, without weights: the first stage of a run.

    `recipe` has no key left at `auto` that the search decides. `source` holds the weights: the published model, or
    `start` once it is written. `arrays` is the model as the method splits it, with ArraySpecs for arrays, and the spec
    that fits it. `decisions` are the automatic choices, for the banner. `teacher` is what a distillation learns from.

    The later stages have these fields too: train.run_setup.PreparedRun, and train.assemble.LoadedRun.
    """

    recipe: Recipe
    start: Start
    source: pathlib.Path
    precision: Precision
    arrays: PreparedModel
    machine: Machine
    layout: Layout | None
    decisions: list[Decision]
    teacher: Teacher | None

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec

    @property
    def method(self) -> Method:
        """The method with its targets resolved for the start's model."""
        return self.start.method

    @property
    def quantize(self) -> QuantizeConfig | None:
        """The quantisation of the base; "none" changes nothing where a checkpoint is not published quantised."""
        return quantization_of(self.recipe, self.start.spec)

    @property
    def offload(self) -> tuple[OffloadName, ...]:
        return self.recipe.compute.offload

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, over all devices."""
        return self.recipe.train.batch_size // self.recipe.train.accumulation


def resolve_run(
    recipe: Recipe,
    machine: Machine,
    check_mesh: Callable[[MeshConfig], None] | None = None,
    *,
    weights: bool = True,
) -> Run:
    """Resolves a recipe for `machine`; `check_mesh` compares its mesh with the devices of a job.

    Without `weights` the model's config is enough. Raises: UserError for a model that does not exist, or a method or
    mesh that is impossible.
    """
    source = locate(recipe.model.path, recipe.model.revision, allow=MODEL if weights else CONFIG)
    config = load_config(source)
    precision, decision = precision_of(recipe, stored_dtype(source, config), machine.platform, machine.chip, config)
    start = start_of(recipe, source, precision.frozen)
    _check_length(recipe.data.max_length, start.spec)
    quantize = quantization_of(recipe, start.spec)
    arrays = abstract_model(recipe, start.method, start.spec, precision.trainable, quantize)
    teacher = teacher_of(recipe, precision.frozen, start.spec, weights=weights) if recipe.teacher else None
    mesh, why = mesh_of(recipe, len(machine.devices), arrays.spec)
    if check_mesh is not None:
        check_mesh(mesh)
    resolve_mesh(mesh, len(machine.devices))
    check_batch(mesh, recipe.train.batch_size // recipe.train.accumulation, 0)
    layout, decisions = layout_of(mesh, why, arrays.spec, machine)
    notes = [Decision("model", arrays.spec.family, note) for note in arrays.spec.notes]
    notes += [Decision("model", *note) for note in passing_notes(source, start.spec)]
    coverage = coverage_decisions(start.method, arrays.spec, vision_training(recipe))
    if CRITIC in arrays.trainable:
        coverage.append(
            Decision("critic", "trained with the model", "its own adapters or weights, no part of the result")
        )
    decisions = [*notes, *coverage, decision, *decisions, *quantize_decisions(arrays, layout, quantize)]
    if teacher is not None:
        layout = with_teacher_axes(layout, teacher)
        decisions.append(Decision("teacher", teacher.path, f"{teacher.spec.family}, frozen beside the student"))
    elif recipe.teacher is not None:
        decisions.append(Decision("teacher", recipe.teacher.path, "a server, asked about every completion"))
    return Run(recipe, start, source, precision, arrays, machine, layout, decisions, teacher)


def quantization_of(recipe: Recipe, spec: ModelSpec) -> QuantizeConfig | None:
    """Returns the quantisation that a recipe asks for: "none" is for a checkpoint that is published quantised."""
    quantize = recipe.quantize
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
