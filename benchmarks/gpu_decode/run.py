"""Decode steps of an 8B on a GPU: attention by `direct` and by the kernel over stacked caches, and layers apart.

    python benchmarks/gpu_decode/run.py [--json result.json]

Random weights of Llama 3.1 8B's shape in bfloat16, `rows` texts of `context` tokens in caches of 1,024 slots, tokens
drawn at temperature 1 with their log-probabilities, 16 steps a call, the fastest of four calls. `layers apart`: every
layer's weights are arrays of their own, which XLA does not copy out of the stacked ones in every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import meshtune.kernels.attention as attention
from meshtune.arrays.spec import ArraySpec
from meshtune.families import model_spec
from meshtune.generate import programs
from meshtune.generate.request import Sampling
from meshtune.model.compute import Compute
from meshtune.model.spec import abstract_params

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SLOTS, CASES = 1024, [(1, 600), (64, 600), (256, 300)]
KERNEL = attention.decode_refusal


@jax.jit
def layer(stacked, number):
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), stacked)


def measure(params, spec, compute, rows: int, context: int) -> dict[str, object]:
    switches, knobs = programs.compiled_form([Sampling(1.0, seed=row) for row in range(rows)])
    layers = programs.empty_layers(spec, compute, rows, SLOTS)
    layers = jax.tree.map(lambda array: array + jnp.asarray(0.01, array.dtype), layers)
    token, length, remaining = (jnp.full(rows, n, jnp.int32) for n in (1, context, programs.STEPS))
    feed = programs.Feed(token, length, remaining, jnp.full((rows, 8), -1, jnp.int32))
    counts = programs.Counts(jnp.zeros((rows, 0), bool), jnp.zeros((rows, 0), jnp.int32))
    static = {"spec": spec, "compute": compute, "switches": dataclasses.replace(switches, reports_drawn=True)}
    steps, seconds, decoded = (np.int32(programs.STEPS), np.bool_(False)), [], None
    for _ in range(5):
        start = time.perf_counter()
        layers, counts, decoded = programs.decode(params, layers, counts, feed, knobs, *steps, alternatives=0, **static)
        jax.block_until_ready(decoded)
        seconds.append(time.perf_counter() - start)
    assert decoded is not None
    step = min(seconds[1:]) / programs.STEPS
    return {"ms": 1e3 * step, "tokens_per_second": rows / step, "first": np.asarray(decoded.tokens)[:4, 0].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    options = parser.parse_args()
    spec, compute = model_spec(CONFIG), Compute("bfloat16", platform="cuda")
    leaves, tree = jax.tree.flatten(abstract_params(spec), is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    normal = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    params = jax.tree.unflatten(tree, [normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])
    apart = {key: tuple(layer(node, n) for n in range(32)) for key, node in params["layers"].items()}
    variants = {
        "direct": (params, lambda request: "not measured"),
        "kernel": (params, KERNEL),
        "kernel, layers apart": (params | {"layers": apart}, KERNEL),
    }
    record: dict[str, object] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for rows, context in CASES:
        for name, (tree, refusal) in variants.items():
            attention.decode_refusal = refusal
            jax.clear_caches()
            result = measure(tree, spec, compute, rows, context)
            record[f"{rows} rows, {context} tokens, {name}"] = result
            print(rows, context, name, result, flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
