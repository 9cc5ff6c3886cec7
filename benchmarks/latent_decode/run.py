"""One token's latent attention over a cache, expanded and absorbed, alternated in one process, float32.

    python benchmarks/latent_decode/run.py [--slots 4096] [--rounds 9] [--json result.json]

A layer's block alone, with the sizes of DeepSeek V2 Lite: 16 heads, latents of 512 numbers, 2,048 of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.arrays.tree import flatten, unflatten
from meshtune.model.block import Context
from meshtune.model.cache import LayerCache
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, sequence_info
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec

EMBED = 2048


class Expanding(LatentAttentionSpec):
    """Latent attention that always computes the heads' keys and values from the latents."""

    def absorbs(self, *_: object, **__: object) -> bool:
        return False


def compiled(spec: LatentAttentionSpec, node, x, arrays):
    """A decode step of the block: its result, and the cache's next arrays."""
    slots = arrays["latent"].shape[2]

    def step(node, x, arrays):
        positions = jnp.full((1, 1), slots - 1)
        rows = sequence_info(Inputs(positions, positions, jnp.ones_like(positions)), (spec.rope,))
        cache = LayerCache(arrays, 0, jnp.full((1,), slots - 1))
        output = spec.apply(x, node, Context(Compute(), rows, {}), cache)
        assert output.cache is not None
        return output.y, output.cache.arrays

    return jax.jit(step, donate_argnums=2).lower(node, x, arrays).compile()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    sizes = (16, 128, 128, 512, RopeSpec(1e4, 64, interleaved=True), NormSpec(1e-6), 192**-0.5)
    specs = {"expanded": Expanding(*sizes), "absorbed": LatentAttentionSpec(*sizes)}
    spec, rng = specs["absorbed"], np.random.default_rng(0)
    leaves = flatten(spec.params(EMBED))
    node = unflatten({path: jnp.asarray(rng.normal(0, 0.02, leaf.shape), "float32") for path, leaf in leaves.items()})
    empty = spec.cache(1, options.slots, "float32")
    arrays = {name: jnp.asarray(rng.normal(size=(1, *leaf.shape)), "float32") for name, leaf in empty.items()}
    x = jnp.asarray(rng.normal(size=(1, 1, EMBED)), "float32")
    steps = {name: compiled(spec, node, x, arrays) for name, spec in specs.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    results = {}
    for _ in range(options.rounds + 1):
        for name, step in steps.items():
            copies = jax.block_until_ready(jax.tree.map(jnp.copy, arrays))
            start, cpu = time.perf_counter(), time.process_time()
            results[name] = jax.block_until_ready(step(node, x, copies)[0])
            seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))
    record: dict[str, object] = {
        "load": os.getloadavg()[0],
        "jax": jax.__version__,
        "slots": options.slots,
        "difference": float(jnp.abs(results["absorbed"] - results["expanded"]).max()),
        "largest": float(jnp.abs(results["expanded"]).max()),
    }
    for name, step in steps.items():
        wall, cpu = (statistics.median(times) for times in zip(*seconds[name][1:], strict=True))
        memory, cost = step.memory_analysis(), step.cost_analysis()
        record[name] = {
            "wall_ms": 1e3 * wall,
            "processor_ms": 1e3 * cpu,
            "operations": None if cost is None else cost["flops"],
            "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        }
    print(json.dumps(record, indent=2))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
