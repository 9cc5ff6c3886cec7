"""A recipe's step through a compiler: what runs in the compiler's process."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from meshtune.config.recipe import Recipe
from meshtune.plan.collectives import collectives_of
from meshtune.plan.compilers.stage import now
from meshtune.plan.compilers.topology import refused_bytes
from meshtune.plan.hardware import Target
from meshtune.plan.program import step_of

MEMORY = ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_alias", "host_temp")


def compile_step(target: Target, devices: list[Any], recipe: dict[str, Any], length: int | None) -> dict[str, Any]:
    """The fields of `compiled.Compiled` that only the compiler's process knows."""
    import jax

    began = time.perf_counter()
    now("tracing")
    program = step_of(Recipe.model_validate(recipe), target, devices, length)
    lowered = program.lower()
    traced = time.perf_counter()
    found: dict[str, Any] = {
        "mesh": program.mesh,
        "rows": program.rows,
        "length": program.length,
        "accumulation": program.accumulation,
        "breakdown": program.breakdown(),
        "choices": [dataclasses.asdict(choice) for choice in program.choices],
        "lower_seconds": traced - began,
    }
    now("compiling")
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # A TPU's compiler places every buffer and refuses a program that does not fit: that is an answer.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        words = str(error)
        refusal = {"out_of_memory": words[:4000], "needed_bytes": refused_bytes(words)}
        return found | refusal | {"compile_seconds": time.perf_counter() - traced}
    found["compile_seconds"] = time.perf_counter() - traced
    memory = compiled.memory_analysis()
    found |= {f"{name}_bytes": int(getattr(memory, f"{name}_size_in_bytes")) for name in MEMORY}
    found["generated_code_bytes"] = int(memory.generated_code_size_in_bytes)
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    found["flops"], found["bytes_accessed"] = cost.get("flops"), cost.get("bytes accessed")
    found["optimal_seconds"] = cost.get("optimal_seconds")
    found["collectives"] = _collectives(compiled)
    return found


def _collectives(compiled: Any) -> list[dict[str, Any]] | None:
    """None where the plugin's program is written in words that this JAX's reader is too old for."""
    import jax

    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    return [dataclasses.asdict(one) for one in collectives_of(text)]
