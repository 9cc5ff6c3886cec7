"""Compiles a recipe's step for a target, and the figures of the compiled program."""

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
from meshtune.plan.compilers.find import Compiler, require_compiler
from meshtune.plan.compilers.process import LIMIT, Progress, run
from meshtune.setup.stage import row_length
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config

# The roles of a step's arguments.
ROLES = ("frozen", "trained", "optimizer", "batch")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled for a target. All bytes are per device; host_* are bytes of host memory for that device.

    `breakdown` splits argument_bytes + host_argument_bytes by ROLES: {"frozen": {"device": n, "host": n}, ...}; it is
    computed from shapes (the compiler may add padding). `out_of_memory` is the compiler's message if it refuses the
    program because it does not fit, else None; if it is set, all byte counts but the breakdown are 0, and
    `needed_bytes` is the size in that message, if it states one. `collectives` are costs.collectives.Collective as
    dicts, None if the compiled program cannot be read. `flops`, `bytes_accessed` and `optimal_seconds` are per device,
    None if the compiler does not report them. `notes` list the approximations made for the target. `cached` is true
    for the result of an earlier call.
    """

    target: str
    compiler: str
    mesh: dict[str, int]
    rows: int
    length: int
    accumulation: int
    breakdown: dict[str, dict[str, int]]
    choices: list[dict[str, str]]
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    generated_code_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0
    host_alias_bytes: int = 0
    host_temp_bytes: int = 0
    out_of_memory: str | None = None
    needed_bytes: int | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    optimal_seconds: float | None = None
    collectives: list[dict[str, object]] | None = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    cached: bool = False

    @property
    def device_bytes(self) -> int:
        """Peak bytes on one device; if the program was refused, the bytes that the compiler says it needs."""
        if self.out_of_memory is not None:
            return self.needed_bytes or 0
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def host_bytes(self) -> int:
        """Peak bytes in host memory for one device."""
        return self.host_argument_bytes + self.host_output_bytes - self.host_alias_bytes + self.host_temp_bytes

    def to_json(self) -> dict[str, object]:
        """Plain values; `Compiled(**values)` is the inverse."""
        return dataclasses.asdict(self)


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
