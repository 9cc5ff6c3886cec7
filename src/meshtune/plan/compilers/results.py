"""A recipe compiled for a target, or what an earlier call found for the same program."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
from typing import Any

from meshtune.cache import cache_folder
from meshtune.config.recipe import Recipe
from meshtune.mesh.agreement import code_version
from meshtune.plan.compilers.compiled import Compiled
from meshtune.plan.compilers.find import Found, found_or_error
from meshtune.plan.compilers.process import LIMIT, Progress, run
from meshtune.plan.hardware import Target
from meshtune.setup.stage import row_length
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config

# What does not change the program: where things go, what is written, when it is looked at, which records there are.
NOT_OF_THE_PROGRAM = ("output", "eval", "sample", "log", "checkpoint", "seed", "resume", "overwrite", "data")


def compiled(
    recipe: Recipe,
    target: Target,
    *,
    length: int | None = None,
    cache: bool = True,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Compiled:
    """What the compiler of `target` says of the recipe's train step. No weights, data or accelerators are needed.

    `length` is that of a row (see `program.step_of`), `limit` in seconds. With `cache` the answer is kept, and one that
    was kept is given at once if model, recipe, target, compiler and Meshtune are the same. Raises: UserError for a
    missing compiler, and as `step_of` does.
    """
    compiler = found_or_error(target.device.platform)
    kept = cache_folder() / "plans" / f"{_key(recipe, target, length, compiler)}.json"
    if cache and (earlier := _read(kept)) is not None:
        return earlier
    fields = run(
        target,
        "meshtune.plan.compilers.step:compile_step",
        {"recipe": recipe.model_dump(mode="json"), "length": length},
        compiler=compiler,
        limit=limit,
        progress=progress,
    )
    notes = [*compiler.notes]
    if target.device.compiled_as:
        notes.append(f"compiled as for {target.device.compiled_as}: XLA refuses {target.device.arch}")
    found = Compiled(target=str(target), compiler=str(compiler), notes=notes, **fields)
    if cache:
        _write(kept, found)
    return found


def _key(recipe: Recipe, target: Target, length: int | None, compiler: Found) -> str:
    fields = {name: value for name, value in recipe.model_dump(mode="json").items() if name not in NOT_OF_THE_PROGRAM}
    facts: dict[str, Any] = {
        "recipe": fields,
        "length": length or row_length(recipe),
        "model": load_config(locate(recipe.model.path, recipe.model.revision, allow=CONFIG)),
        "device": dataclasses.asdict(target.device),
        "hosts": target.hosts,
        "each": target.each,
        "compiler": compiler.packages,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        "flags": os.environ.get("XLA_FLAGS", ""),
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(path: pathlib.Path) -> Compiled | None:
    try:
        return Compiled(**(json.loads(path.read_text(encoding="utf-8")) | {"cached": True}))
    except (OSError, ValueError, TypeError):
        return None  # not there, cut short, or of another Meshtune


def _write(path: pathlib.Path, found: Compiled) -> None:
    """A full disk or a read-only home is no reason to withhold the answer: then the next call compiles again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(found.to_json(), file)
        os.replace(scratch, path)
