"""Updates of a tiny model with and without what waits in the host's memory: `offload_cases.py OUT.json CASE ...`."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

UPDATES, MICRO, ROWS, LENGTH, VOCAB = 3, 2, 4, 64, 128


@dataclasses.dataclass(frozen=True)
class Case:
    """`compute` are fields of model.compute.Compute. A `fused` case is compared with an ordinary step."""

    mesh: dict[str, int]
    compute: dict[str, Any]
    method: str = "lora"
    quantize: bool = False
    optimizer: str = "adamw"
    fused: bool = False
    vocab: int = VOCAB
    tied: bool = False


ALL = ("residual", "optimizer", "weights")
CASES = {
    "lora, all": Case({}, {"remat": "full", "offload": ALL, "attention_chunk": 16, "mlp_chunk": 8}),
    "lora, all, nf4": Case({}, {"remat": "full", "offload": ALL}, quantize=True),
    "lora, tables": Case({}, {"remat": "full", "offload": ("tables", "residual")}),
    "lora, tables, tied, fsdp=2 tp=2": Case({"fsdp": 2, "tp": 2}, {"offload": ("tables",)}, tied=True),
    "full, optimizer": Case({}, {"offload": ("optimizer",)}, method="full"),
    "lora, weights, nothing made again": Case({}, {"offload": ("weights",)}),
    "fsdp=4, all": Case({"fsdp": 4}, {"remat": "full", "offload": ALL, "attention_chunk": 16, "mlp_chunk": 8}),
    "fsdp=2 tp=2, full": Case(
        {"fsdp": 2, "tp": 2}, {"remat": "selective", "offload": ("residual", "optimizer"), "mlp_chunk": 24}, "full"
    ),
    "fused, all": Case({}, {"remat": "full", "offload": ALL}, "full", fused=True, vocab=200),
    "fused, weights, 8 bits": Case(
        {}, {"remat": "full", "offload": ("optimizer", "weights")}, "full", optimizer="adamw8bit", fused=True
    ),
    "fused, tied, muon": Case({}, {"remat": "full", "offload": ALL}, "full", optimizer="muon", fused=True, tied=True),
    "fused, the upper layers": Case({}, {"remat": "full", "offload": ALL}, "freeze", fused=True),
    "fused, fsdp=2 tp=2, all": Case({"fsdp": 2, "tp": 2}, {"remat": "full", "offload": ALL}, "full", fused=True),
    "fsdp=2 cp=2, chunks": Case({"fsdp": 2, "cp": 2}, {"remat": "full", "mlp_chunk": 8, "offload": ("residual",)}),
}


def batch(micro: int = MICRO, rows: int = ROWS) -> dict[str, Any]:
    """[micro, rows, LENGTH]: two documents a row, half of the positions supervised."""
    import numpy as np

    rng, shape = np.random.default_rng(3), (micro, rows, LENGTH)
    tokens = rng.integers(0, VOCAB, (*shape[:2], LENGTH + 1)).astype(np.int32)
    segments = np.broadcast_to(np.repeat([1, 2], [24, LENGTH - 24]), shape).astype(np.int32)
    positions = np.broadcast_to(np.r_[:24, : LENGTH - 24], shape).astype(np.int32)
    weights = (rng.random(shape) < 0.5).astype(np.float32)
    return {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": positions,
        "segment_ids": segments,
        "weights": weights,
    }


def updates(case: Case, *, offloaded: bool) -> dict[str, Any]:
    """Loss and gradient norm of every update, the trained leaves at the end, and where arrays lie."""
    import jax
    import numpy as np

    from meshtune.adapters.config import FreezeConfig, FullConfig, LoraConfig
    from meshtune.adapters.method import abstract, prepare
    from meshtune.arrays.tree import flatten, unflatten
    from meshtune.families import model_spec
    from meshtune.kernels.attention import zigzag_order
    from meshtune.mesh import placement
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.model.compute import Compute
    from meshtune.model.gather import layout_for
    from meshtune.model.spec import init_params
    from meshtune.objectives.sft import sft_objective
    from meshtune.optim.build import OptimizerConfig, make_optimizer
    from meshtune.quantize.config import QuantizeConfig
    from meshtune.quantize.weight import QuantisedWeight
    from meshtune.train.step import host_state as update
    from meshtune.train.step.build import make_train_step
    from meshtune.train.step.state import abstract_state, init_state

    config = {
        "model_type": "llama", "vocab_size": case.vocab, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": case.tied, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.1,
    }  # fmt: skip
    placement.MIN_OFFLOAD_BYTES = 1  # this model's arrays are all small
    update.PIECE = 4 * 64 * 48  # 48 rows of the embedding
    spec = model_spec(config, "float32")
    params = init_params(spec, jax.random.key(1))
    quantize = QuantizeConfig("nf4", 32, True) if case.quantize else None
    if quantize:
        leaves = {
            path: QuantisedWeight.quantise(leaf, quantize) if "attn/" in path or "mlp/" in path else leaf
            for path, leaf in flatten(params).items()
        }
        params = unflatten(leaves)
    method = {"full": FullConfig(), "freeze": FreezeConfig(last_layers=2), "lora": LoraConfig(rank=8)}[case.method]
    arrays = abstract(method, spec, "float32", quantize)
    prepared = prepare(method, spec, params, jax.random.key(2))
    fused = case.fused and offloaded
    # Adam's first updates turn differences in gradients near zero into some of their own size, but for eps.
    eps = 1e-4 if case.fused else 1e-8
    chosen = OptimizerConfig(case.optimizer, learning_rate=1e-3, weight_decay=0.1, eps=eps, in_backward=fused)
    optimizer, layout, order = make_optimizer(chosen, 9, arrays.trainable, arrays.spec)[0], None, None
    trainable, frozen = prepared.trainable, prepared.frozen
    mesh = MeshConfig(**case.mesh)
    if mesh.devices > 1:
        layout, _ = layout_for(make_mesh(mesh, jax.devices()[: mesh.devices]), spec)
        trainable = jax.device_put(trainable, placement.shardings(arrays.trainable, layout))
        frozen = jax.device_put(frozen, placement.shardings(arrays.frozen, layout))
        order = zigzag_order(LENGTH, mesh.cp) if mesh.cp > 1 else None
    fields: dict[str, Any] = case.compute if offloaded else {}
    offload = fields.get("offload", ())
    if not {"weights", "tables"}.isdisjoint(offload):
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), frozen)
        frozen = placement.offload_arrays(frozen, placement.offload_frozen(like, arrays.frozen, offload))
    compute = Compute(loss_chunk=16, layout=layout, **fields)
    like = abstract_state(arrays.trainable, optimizer, layout, offload) if layout or offload else None
    if like is not None:
        trainable = placement.offload_arrays(trainable, like.trainable)
    state = init_state(trainable, optimizer, like)
    step = make_train_step(
        sft_objective,
        arrays.spec,
        compute,
        optimizer,
        max_grad_norm=None if case.fused else 1.0,
        abstract=arrays.trainable,
    )
    rows = batch(1, MICRO * ROWS) if case.fused else batch()
    history: dict[str, Any] = {"loss": [], "grad_norm": []}
    for _ in range(UPDATES):
        state, metrics = step(state, frozen, placement.place_batch(rows, layout, order), np.int32(7))
        for name in history:
            history[name].append(float(metrics[name]))
    kinds = {
        role: sorted({leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim})
        for role, tree in (("optimizer", state.opt_state), ("frozen", frozen), ("trainable", state.trainable))
    }
    leaves = [jax.device_get(leaf).astype(np.float64).ravel().tolist() for leaf in jax.tree.leaves(state.trainable)]
    return history | {"leaves": leaves, "kinds": kinds}


def main(out: str, names: list[str]) -> None:
    results = {
        name: {"with": updates(CASES[name], offloaded=True), "without": updates(CASES[name], offloaded=False)}
        for name in names
    }
    pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(sys.argv[1], sys.argv[2:])
