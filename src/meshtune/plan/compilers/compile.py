"""Compiles a recipe's step for a target, with a cache of results on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile

from meshtune.cache import cache_folder
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.mesh.agreement import code_version
from meshtune.plan.compilers.compiled import Compiled
from meshtune.plan.compilers.find import Compiler, require_compiler
from meshtune.plan.compilers.process import LIMIT, Progress, run
from meshtune.setup.stage import row_length
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config

# Sections of a recipe that do not change the compiled program.
IRRELEVANT = ("output", "eval", "evaluate", "sample", "log", "checkpoint", "seed", "resume", "overwrite", "data")


def compile_recipe(
    recipe: Recipe,
    target: Target,
    *,
    length: int | None = None,
    cache: bool = True,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Compiled:
    """Compiles the recipe's train step for `target`, without weights, data or accelerators.

    `length` is that of a row (see `program.step_of`); `limit` is a time limit in seconds. With `cache` the result is
    stored, and a stored result for the same model, recipe, target, compiler and version of Meshtune is returned.
    Raises: UserError for a missing compiler, and as `step_of` does.
    """
    compiler = require_compiler(target.device.platform)
    cached = cache_folder() / "plans" / f"{_key(recipe, target, length, compiler)}.json"
    if cache and (earlier := _read(cached)) is not None:
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
    compiled = Compiled(target=str(target), compiler=str(compiler), notes=notes, **fields)
    if cache:
        _write(cached, compiled)
    return compiled


def _key(recipe: Recipe, target: Target, length: int | None, compiler: Compiler) -> str:
    """A digest of everything that determines the compiled program."""
    sections = {name: value for name, value in recipe.model_dump(mode="json").items() if name not in IRRELEVANT}
    facts: dict[str, object] = {
        "recipe": sections,
        "length": length or row_length(recipe),
        "model": load_config(locate(recipe.model.path, recipe.model.revision, allow=CONFIG)),
        "device": dataclasses.asdict(target.device),
        "hosts": target.hosts,
        "per_host": target.per_host,
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
        return None  # absent, truncated, or written by another version


def _write(path: pathlib.Path, compiled: Compiled) -> None:
    """Stores a result atomically. A full disk or a read-only home only means that the next call compiles again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(compiled.to_json(), file)
        os.replace(scratch, path)
