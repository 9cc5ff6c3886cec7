"""Compiles a recipe's step; this runs in the compiler process."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from meshtune.config.recipe import Recipe
from meshtune.costs.collectives import collectives_of
from meshtune.costs.hardware import Target
from meshtune.plan.compilers.process import report_stage
from meshtune.plan.compilers.topology import refused_bytes
from meshtune.plan.program import step_of

if TYPE_CHECKING:
    import jax

MEMORY = ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_alias", "host_temp")


def compile_step(
    target: Target, devices: list[jax.Device], recipe: dict[str, object], length: int | None
) -> dict[str, object]:
    """Compiles the step and returns the fields of `compiled.Compiled` but target, compiler and notes."""
    import jax

    start = time.perf_counter()
    report_stage("tracing")
    program = step_of(Recipe.model_validate(recipe), target, devices, length)
    lowered = program.lower()
    traced = time.perf_counter()
    fields: dict[str, object] = {
        "mesh": program.mesh,
        "rows": program.rows,
        "length": program.length,
        "accumulation": program.accumulation,
        "breakdown": program.breakdown(),
        "choices": [dataclasses.asdict(choice) for choice in program.decisions],
        "lower_seconds": traced - start,
    }
    report_stage("compiling")
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # A TPU's compiler allocates every buffer and refuses a program that does not fit: that is a result.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = str(error)
        refusal = {"out_of_memory": message[:4000], "needed_bytes": refused_bytes(message)}
        return fields | refusal | {"compile_seconds": time.perf_counter() - traced}
    fields["compile_seconds"] = time.perf_counter() - traced
    memory = compiled.memory_analysis()
    assert memory is not None, f"the compiler for {target} reports no memory"
    fields |= {f"{name}_bytes": int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY}
    fields["generated_code_bytes"] = int(memory.generated_code_size_in_bytes)
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    fields["flops"], fields["bytes_accessed"] = cost.get("flops"), cost.get("bytes accessed")
    fields["optimal_seconds"] = cost.get("optimal_seconds")
    fields["collectives"] = _collectives(compiled)
    return fields


def _collectives(compiled: jax.stages.Compiled) -> list[dict[str, object]] | None:
    """The collectives of the compiled program, None if this JAX is too old to parse the plugin's output."""
    import jax

    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    return [dataclasses.asdict(collective) for collective in collectives_of(text or "")]
