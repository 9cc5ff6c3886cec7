"""Resolves a recipe's stage: its objective, the arrays of its batches, and the reference model."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshtune.adapters.method import PreparedModel, abstract
from meshtune.adapters.training_method import Method, VisionTraining
from meshtune.arrays.batch import BATCH_ARRAYS, TOKEN_ARRAYS
from meshtune.config.recipe import Recipe
from meshtune.costs.workload import planned_patches
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Objective
from meshtune.objectives.config import DistillConfig, SftConfig
from meshtune.objectives.stages import STAGES
from meshtune.quantize.config import QuantizeConfig
from meshtune.setup.choices import Decision

BASE, CACHED, AUTO = "base", "cached", "auto"
abstract_critic = LazyFunction("meshtune.objectives.critic:abstract_critic")
online_arrays = LazyFunction("meshtune.rollout.batch:online_arrays")
named_sizes = LazyFunction("meshtune.rollout.batch:named_sizes")
loss_temperature = LazyFunction("meshtune.rollout.batch:loss_temperature")
computed_values = LazyFunction("meshtune.rollout.batch:computed_values")
PLANNED_LENGTH = 128  # tokens of an answer with its prompt, where there are no data yet to tell


def objective_of(recipe: Recipe, teacher: ModelSpec | None = None) -> Objective:
    """Builds the objective that the step differentiates; `teacher` is the spec of a distillation's teacher."""
    stage = STAGES[recipe.stage.kind]
    if teacher is not None:
        return stage.make(recipe.stage, teacher)
    if stage.dataset_type == "prompts":
        return stage.make(recipe.stage, loss_temperature(recipe))
    return stage.make(recipe.stage)


def abstract_model(
    recipe: Recipe, method: Method, spec: ModelSpec, dtype: str, quantize: QuantizeConfig | None = None
) -> PreparedModel:
    """The model as the method splits it, with the critic of a stage that trains one, with ArraySpecs for arrays.

    Trained arrays have `dtype`. Raises: UserError as adapters.method.abstract does.
    """
    model = abstract(method, spec, dtype, quantize, vision_training(recipe))
    return abstract_critic(model, dtype) if STAGES[recipe.stage.kind].has_critic else model


def vision_training(recipe: Recipe) -> VisionTraining | None:
    """The parts of a model that sees that are trained besides the method; None for text."""
    vision = recipe.vision
    return None if vision is None else VisionTraining(tuple(vision.train), vision.freeze_language)


def evaluation_objective_of(recipe: Recipe, teacher: ModelSpec | None = None) -> Objective:
    """Builds the objective of validation: of supervised tuning, the plain loss of every target. Smoothed labels and
    weights by probability would hide it from early stopping and from the choice of the best checkpoint."""
    stage = recipe.stage
    if teacher is not None:
        return objective_of(recipe, teacher)
    if isinstance(stage, SftConfig):
        stage = dataclasses.replace(stage, loss="nll", label_smoothing=0.0)
    return STAGES[stage.kind].make(stage)


def draws(recipe: Recipe, method: Method) -> bool:
    """Whether a step needs random numbers: dropout, noise."""
    noisy = isinstance(recipe.stage, SftConfig) and recipe.stage.neftune_alpha is not None
    return noisy or method.draws


def row_length(recipe: Recipe) -> int:
    """Positions of a packed row, which has room for a unit of documents of max_length."""
    return recipe.data.max_length * STAGES[recipe.stage.kind].unit_segments


ShapeAndDtype = tuple[tuple[int, ...], np.dtype]


def batch_arrays(
    recipe: Recipe, method: Method, spec: ModelSpec, shape: tuple[int, int, int], *, shared_prompts: bool = False
) -> dict[str, ShapeAndDtype]:
    """(shape, dtype) of every array of a batch [micro-batches, rows, positions], as far as it is known without data:
    the number of units a row has room for is a guess, which changes next to nothing, and so is that of patches."""
    (micro_batches, rows, length), stage, names = shape, STAGES[recipe.stage.kind], list(TOKEN_ARRAYS)
    if recipe.rollout is not None:
        names = online_arrays(recipe, shared=shared_prompts)
    elif stage.dataset_type != "documents":
        names += ["units", "values"]
        if stage.nll_mean(recipe.stage) is not None:
            names.append("nll")
        choice = reference_of(recipe, method)
        if choice is not None and choice.value != BASE:
            names.append("reference")
    units = max(1, length // (stage.unit_segments * PLANNED_LENGTH)) if recipe.data.packing else 1
    sizes = {"batch": rows, "length": length, "units": units, "segments": stage.unit_segments * units}
    if spec.vision is not None:
        names += picture_arrays(spec)
        sizes |= {"patches": planned_patches(recipe, spec, length), "pixels": spec.vision.pixels, "grid": 4, "axes": 3}
    if recipe.rollout is not None:
        if spec.vision is not None and spec.vision.mutual == "prefix":
            raise UserError(
                "this model reads its prompts both ways, which online stages do not do yet",
                where=f"stage: {recipe.stage.kind}",
                fix="use sft or dpo, or another model that sees",
            )
        sizes |= named_sizes(recipe)
    arrays = ((name, BATCH_ARRAYS[name]) for name in names)
    return {name: ((micro_batches, *array.shape(sizes)), np.dtype(array.dtype)) for name, array in arrays}


def picture_arrays(spec: ModelSpec) -> list[str]:
    """The arrays that a batch with pictures has in addition."""
    assert spec.vision is not None
    further = {"mrope_positions": any(rope.sections for rope in spec.ropes), "reach": spec.vision.mutual is not None}
    return ["patches", "patch_segments", "patch_grid", "visual", *(name for name, reads in further.items() if reads)]


def scoring_passes(recipe: Recipe) -> int:
    """Passes over a rollout before its first update: for old log-probabilities, a critic's values and a reference."""
    needed = set() if isinstance(recipe.stage, DistillConfig) else computed_values(recipe)
    return len(needed & {"old", "values_old", "reference_tokens"})


def reference_of(recipe: Recipe, method: Method) -> Decision | None:
    """Resolves the reference model: base, cached, or another model; None for stages without a reference.

    Raises UserError where the base with its adapters off is asked for and is not what the run starts from, and where
    log-probabilities would have to be computed before training for data that are tokenised during it.
    """
    requested = getattr(recipe.stage, "reference", None)
    if requested is None:
        return None
    vision = vision_training(recipe)
    trained = f"vision.train changes the {' and the '.join(vision.train)}" if vision and vision.train else None
    decision = _reference(requested, method.reference_obstacle or trained)
    if recipe.data.streaming and decision.value != BASE:
        raise UserError(
            f"data.streaming is not possible with the reference {decision.value} ({decision.reason}): its "
            "log-probabilities are computed for all data before training",
            where="stage.reference",
            fix="train an adapter on the base, which is the reference with its adapters off (stage.reference: auto); "
            "or set data.streaming=false",
        )
    return decision


def _reference(requested: str, obstacle: str | None) -> Decision:
    if requested == AUTO:
        if obstacle is None:
            return Decision("reference", BASE, "auto: the base with its adapters off, no second copy")
        return Decision("reference", CACHED, f"auto: {obstacle}, so the start's log-probabilities are kept on disk")
    if requested == BASE and obstacle is not None:
        raise UserError(
            f"the base with its adapters off is no reference here: {obstacle}",
            where="stage.reference",
            fix="use cached (or auto)",
        )
    return Decision("reference", requested, "asked for")
