"""Starts, losses and gradients of kinds of adapters on 8 simulated devices, as JSON: test_kinds_on_meshes runs it."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.inputs import input_sizes
from meshtune.adapters.kind import Original
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.families import model_spec
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import place_batch, shardings
from meshtune.model.compute import Compute
from meshtune.model.gather import layout_for
from meshtune.model.spec import abstract_params
from meshtune.objectives.sft import sft_objective
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight

MODEL = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "initializer_range": 0.1,
}  # fmt: skip
HEAD = ("all-linear", "lm_head")
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "dora": ({"adapter": "dora", "rank": 4, "targets": HEAD}, None),
    "pissa": ({"adapter": "pissa", "rank": 4, "targets": HEAD, "svd_iterations": None}, None),
    "oft": ({"adapter": "oft", "oft_block_size": 8, "targets": HEAD}, None),
    "vera": ({"adapter": "vera", "rank": 16, "targets": HEAD}, None),
    "loftq, nf4": (
        {
            "adapter": "loftq",
            "rank": 4,
            "loftq_iterations": 2,
            "svd_iterations": None,
            "targets": ("q_proj", "down_proj"),
        },
        "nf4",
    ),
    "loftq, measured": ({"adapter": "loftq", "rank": 4, "loftq_calibration": 8, "svd_iterations": None}, "nf4"),
    "dora, nf4": ({"adapter": "dora", "rank": 4, "dropout": 0.2}, "nf4"),
    "oft, nf4": ({"adapter": "oft", "oft_block_size": 16}, "nf4"),
    "vera, int8": ({"adapter": "vera", "rank": 16, "dropout": 0.2}, "int8"),
}

TEXTS = ("tokens", "positions", "segment_ids")


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (8, 33)).astype(np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), (8, 32))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "segment_ids": np.ones((8, 32), np.int32),
        "weights": (rng.random((8, 32)) < 0.7).astype(np.float32),
    }


def case(options: dict[str, Any], format: str | None, axes: dict[str, int] | None) -> dict[str, Any]:
    config = LoraConfig(**options)
    quantize = None if format is None else QuantizeConfig(format, 16)
    arrays = abstract(config, model_spec(MODEL, "float32"), quantize=quantize)
    specs = flatten(abstract_params(arrays.spec))
    rng = np.random.default_rng(0)
    drawn = {path: rng.standard_normal(leaf.shape).astype(np.float32) for path, leaf in specs.items()}
    plain = {path: 1 + 0.1 * array if "norm" in path else 0.1 * array for path, array in drawn.items()}
    layout = None if axes is None else layout_for(make_mesh(MeshConfig(**axes), jax.devices()), arrays.spec)[0]
    forms = flatten(abstract_params(arrays.spec)) | flatten(arrays.frozen)

    def laid(path: str, leaf: Any, form: Any) -> Any:
        return jax.device_put(leaf, None if layout is None else shardings({path: form}, layout)[path])

    def base_leaf(path: str) -> Any:
        form = forms[path]
        if isinstance(form, QuantisedWeight):
            return QuantisedWeight.quantise(jnp.asarray(plain[path]), form.config)
        return plain[path]

    params = unflatten({path: laid(path, base_leaf(path), forms[path]) for path in plain})
    sizes: dict[str, Any] = {}
    if config.loftq_calibration:
        nodes = [path.rpartition("/") for path in flatten(arrays.trainable)]
        texts = place_batch({name: array for name, array in batch().items() if name in TEXTS}, layout)
        weights = {node: specs[f"{node}/weight"] for node, _, last in nodes if last == "adapter"}
        sizes = input_sizes(weights, params, arrays.spec, Compute(layout=layout), [texts])
    original = functools.cache(
        lambda path: Original(laid(path, plain[path], specs[path]), sizes.get(path.removesuffix("/weight")))
    )
    prepared = prepare(config, arrays.spec, params, jax.random.key(1), layout=layout, original=original)
    starts = norms((prepared.trainable, prepared.frozen))
    leaves, tree = jax.tree.flatten(prepared.trainable)
    moved = [np.asarray(x) + 0.05 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    trainable = jax.tree.unflatten(tree, moved)
    if layout is not None:
        trainable = jax.device_put(trainable, shardings(arrays.trainable, layout))
        assert False in {x.sharding.is_fully_replicated for x in leaves}, "nothing is split"
    compute = Compute(loss_chunk=16, layout=layout, remat="selective")
    key = jax.random.key(5) if options.get("dropout") else None

    def loss(trainable: Any, frozen: Any, batch: Any) -> Any:
        score = sft_objective(merge(trainable, frozen), prepared.spec, compute, batch, key)
        return score.loss / score.weight

    value, gradient = jax.jit(jax.value_and_grad(loss))(trainable, prepared.frozen, place_batch(batch(), layout))
    return {"starts": starts, "loss": float(value), "norms": norms(gradient)}


def norms(tree: Any) -> list[float]:
    """Of every array. The host computes them: no program for each shape and sharding."""
    return [float(np.linalg.norm(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)]


if __name__ == "__main__":
    axes = {"fsdp": 4, "tp": 2}
    for name in json.loads(sys.argv[1]):
        print(json.dumps([name, case(*CASES[name], None), case(*CASES[name], axes)]), flush=True)
