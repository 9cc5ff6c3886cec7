"""Updates from special starts on simulated devices, as JSON: test_starts_on_meshes runs it in a separate process."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from meshtune.adapters.config import ExpandConfig, LoraConfig
from meshtune.adapters.continued import resume_adapter, resumed_config
from meshtune.adapters.method import PreparedModel, abstract, prepare
from meshtune.adapters.peft_format import BaseRecord, save_adapter
from meshtune.adapters.verify import export_adapter
from meshtune.arrays.tree import flatten
from meshtune.families import model_spec, tensors
from meshtune.families.expansion import group_layers
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import place_batch
from meshtune.model.compute import Compute
from meshtune.model.gather import layout_for
from meshtune.model.spec import init_params
from meshtune.objectives.stages import STAGES
from meshtune.optim.build import make_optimizer
from meshtune.optim.config import OptimizerConfig
from meshtune.quantize.config import QuantizeConfig
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state, init_state
from meshtune.weights.load import load_params

LAYERS = 4 if "llama_pro" in sys.argv[1] else 2
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "float32",
}  # fmt: skip
SPEC = model_spec(CONFIG)
NF4 = QuantizeConfig("nf4", 32)
UPDATES = 3


def write_model(where: pathlib.Path) -> pathlib.Path:
    """A random model."""
    flat = flatten(init_params(SPEC, jax.random.key(0)))
    where.mkdir()
    save_file(
        {entry.name: np.asarray(flat[entry.path][entry.index]) for entry in tensors(SPEC)}, where / "model.safetensors"
    )
    (where / "config.json").write_text(json.dumps(CONFIG))
    return where


def adapter(where: pathlib.Path) -> pathlib.Path:
    """An adapter of other ranks in some layers, and rows of tokens."""
    config = LoraConfig(
        rank=4,
        targets=("q_proj", "down_proj"),
        ranks=(("model.layers.1.self_attn.q_proj", 8),),
        token_rows=(90, 91, 95),
    )
    prepared = prepare(config, SPEC, init_params(SPEC, jax.random.key(0)), jax.random.key(1))
    leaves, tree = jax.tree.flatten(prepared.trainable)
    moved = [leaf + 0.05 * jax.random.normal(jax.random.key(n), leaf.shape) for n, leaf in enumerate(leaves)]
    return save_adapter(where, jax.tree.unflatten(tree, moved), prepared.spec, config, BaseRecord("base", "sha256:0"))


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(80, 96, (1, 8, 17)).astype(np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), (1, 8, 16))
    ones = np.ones((1, 8, 16), np.int32)
    return {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": positions,
        "segment_ids": ones,
        "weights": ones.astype(np.float32),
    }


def case(kind: str, model: pathlib.Path, start: pathlib.Path, axes: dict[str, int] | None, out: pathlib.Path) -> dict:
    spec, method = SPEC, resumed_config(start, SPEC, LoraConfig())
    ratio = 4.0
    if kind == "llama_pro":
        spec, method, ratio = group_layers(SPEC, 2), ExpandConfig(blocks=2), None
    plan = abstract(method, spec, "float32", NF4)
    layout = None
    if axes is not None:
        devices = jax.devices()[: MeshConfig(**axes).devices]
        layout = layout_for(make_mesh(MeshConfig(**axes), devices), plan.spec)[0]
    params = load_params(model, plan.spec, layout=layout, quantize=NF4, plain=flatten(plan.trainable))
    if kind == "llama_pro":
        prepared = prepare(method, plan.spec, params, jax.random.key(0), "float32", layout)
    else:
        prepared = resume_adapter(start, plan, plan.spec, params, layout)
    config = OptimizerConfig("adamw", 5e-3, "constant", lora_plus_ratio=ratio)
    optimizer, _ = make_optimizer(config, UPDATES, plan.trainable, plan.spec)
    like = None if layout is None else abstract_state(plan.trainable, optimizer, layout)
    state = init_state(prepared.trainable, optimizer, like)
    compute = Compute(loss_chunk=16, layout=layout)
    objective = STAGES["sft"].make(STAGES["sft"].config())
    step = make_train_step(objective, plan.spec, compute, optimizer, max_grad_norm=1.0, abstract=plan.trainable)
    placed, losses = place_batch(batch(), layout), []
    for _ in range(UPDATES):
        state, metrics = step(state, prepared.frozen, placed, jnp.int32(0))
        losses.append(float(metrics["loss"]))
    if isinstance(method, LoraConfig) and "verified" in sys.argv:
        done = PreparedModel(plan.spec, state.trainable, prepared.frozen)
        export_adapter(out, done, method, BaseRecord("base", "sha256:0"), compute)
    return {"losses": losses, "sums": [float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(state.trainable)]}


if __name__ == "__main__":
    folder = pathlib.Path(tempfile.mkdtemp())
    model, start = write_model(folder / "model"), adapter(folder / "adapter")
    results = {}
    for kind in sys.argv[1].split(","):
        meshes = [None, *json.loads(sys.argv[2])]
        results[kind] = [case(kind, model, start, axes, folder / f"{kind}-{n}") for n, axes in enumerate(meshes)]
    json.dump(results, sys.stdout)
