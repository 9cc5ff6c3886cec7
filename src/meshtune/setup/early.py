"""Checks of a recipe that need neither JAX nor a device: mistakes that would otherwise be said seconds later."""

from __future__ import annotations

import glob
import math
import os
import pathlib
import re

from meshtune.config.recipe import Recipe
from meshtune.data.chat_templates import template_text
from meshtune.data.registry import load_registry
from meshtune.data.sources import check_source_path
from meshtune.errors import UserError
from meshtune.mesh.accelerators import SIMULATED_DEVICES, visible_gpus
from meshtune.mesh.config import MeshConfig
from meshtune.runs.output import check_output
from meshtune.weights.hub import check_adapter, check_path

TPU_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


def check_model(recipe: Recipe) -> None:
    """Raises UserError for paths of model, tokenizer, template, reference and adapters that lead nowhere."""
    model, reference = recipe.model, getattr(recipe.stage, "reference", "auto")
    check_path(model.path, model.revision)
    if model.tokenizer is not None:
        _check_tokenizer(model.tokenizer)
    if model.chat_template is not None:
        template_text(model.chat_template)
    if reference not in ("auto", "base", "cached"):
        check_path(reference)
    for adapter in filter(None, [model.adapter, *model.merge_adapters]):
        check_adapter(adapter)


def check_inputs(recipe: Recipe) -> None:
    """Raises UserError as `check_model`, and for paths of data that lead nowhere."""
    check_model(recipe)
    validation = recipe.data.validation
    if recipe.data.registry is not None:
        load_registry(recipe.data.registry)
    for source in [*recipe.data.train, *(validation if isinstance(validation, list) else [])]:
        if source.path is not None:
            check_source_path(source.path)


def check_run(recipe: Recipe) -> None:
    """Raises UserError as `check_inputs`, and for an output or a mesh that a run of one process cannot have."""
    output = pathlib.Path(recipe.output).expanduser()
    check_output(output, resume=recipe.resume, overwrite=recipe.overwrite)
    check_inputs(recipe)
    if recipe.rollout is not None:
        from meshtune.rollout.environment import Environments
        from meshtune.rollout.rewards import check_rewards

        environments = Environments(recipe.rollout) if recipe.rollout.environment is not None else None
        check_rewards(recipe.rewards, max_tokens=recipe.rollout.max_tokens, environments=environments)
    count = device_count()
    if not isinstance(recipe.mesh, MeshConfig) or count is None:
        return
    least = math.prod(size for size in recipe.mesh.sizes.values() if size != -1)
    if least > count:
        simulate = "" if visible_gpus() else f"simulate them (meshtune launch local --devices {least} ...), or "
        raise UserError(
            f"the mesh {recipe.mesh} needs {least} devices, and this machine has {count}",
            where="mesh",
            fix=f"{simulate}give a mesh whose axes multiply to {count}",
        )


def _check_tokenizer(path: str) -> None:
    if not pathlib.Path(path).is_file():  # for which loading a tokenizer has words of its own
        check_path(path)


def device_count() -> int | None:
    """The devices of this machine that a process may use, by drivers' files and variables; None where these do not
    say, as for TPUs."""
    if gpus := visible_gpus():
        return gpus
    if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu" or any(map(glob.glob, TPU_FILES)):
        return None
    simulated = re.findall(rf"{SIMULATED_DEVICES}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(simulated[-1]) if simulated else int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1)
