"""A small sharded program, to check that a compiler works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshtune.costs.hardware import Target

if TYPE_CHECKING:
    import jax


def compile_trial(target: Target, devices: list[jax.Device]) -> dict[str, int]:
    """Compiles a matrix product and a sum, sharded over all devices; returns {"temp_bytes": n}."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec("all"))
    rows = jax.ShapeDtypeStruct((64 * len(devices), 256), jnp.bfloat16, sharding=sharding)
    step = jax.jit(lambda x: jnp.sum(jnp.tanh(x @ x.T), dtype=jnp.float32))
    memory = step.lower(rows).compile().memory_analysis()
    assert memory is not None, "the backend does not say what the program needs"
    return {"temp_bytes": int(memory.temp_size_in_bytes)}
