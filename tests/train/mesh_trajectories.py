"""Thirty updates of a tiny model on meshes of simulated devices: `mesh_trajectories.py OUT.json CASE ...`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import sys
from typing import Any

UPDATES, MICRO, ROWS, LENGTH, VOCAB = 30, 2, 8, 64, 256


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    method: str = "lora"
    packed: bool = True
    kv_heads: int = 8
    tied: bool = False
    dropout: float = 0.0
    optimizer: str = "adamw"
    fused: bool = False
    dtype: str = "float32"


CASES = {
    "dp=8": Case({"dp": 8}),
    "fsdp=8": Case({"fsdp": 8}),
    "fsdp=8, full": Case({"fsdp": 8}, method="full"),
    "fsdp=8, dropout": Case({"fsdp": 8}, dropout=0.2),
    "tp=8": Case({"tp": 8}),
    "tp=8, fewer key heads": Case({"tp": 8}, kv_heads=2),
    "tp=8, full, fewer key heads, padded, tied": Case({"tp": 8}, method="full", packed=False, kv_heads=2, tied=True),
    "cp=4": Case({"cp": 4}),
    "cp=4, full, padded": Case({"cp": 4}, method="full", packed=False),
    "fsdp=4 tp=2": Case({"fsdp": 4, "tp": 2}),
    "fsdp=4 tp=2, full, padded": Case({"fsdp": 4, "tp": 2}, method="full", packed=False),
    "dp=2 fsdp=2 tp=2": Case({"dp": 2, "fsdp": 2, "tp": 2}, packed=False),
    "dp=2 fsdp=2 tp=2, full": Case({"dp": 2, "fsdp": 2, "tp": 2}, method="full"),
    "fsdp=2 cp=2 tp=2": Case({"fsdp": 2, "cp": 2, "tp": 2}),
    "fsdp=2 cp=2 tp=2, full, tied": Case({"fsdp": 2, "cp": 2, "tp": 2}, method="full", tied=True),
}

SPLIT = {"fsdp": 4, "tp": 2}
OPTIMIZERS = {
    name: Case(SPLIT, method="full", optimizer=name)
    for name in ("adamw8bit", "adam_mini", "muon", "galore", "apollo", "badam", "schedule_free", "prodigy", "sophia")
} | {
    "sgd, fused": Case(SPLIT, method="full", optimizer="sgd", fused=True),
    "adamw8bit, fused, tied": Case(SPLIT, method="full", optimizer="adamw8bit", fused=True, tied=True),
    "galore, fused": Case(SPLIT, method="full", optimizer="galore", fused=True),
}
# The first scale overflows wherever it is looked at, the second nowhere: no rounding decides which updates are skipped.
FIRST_SCALE, SECOND_SCALE = 2.0**40, 2.0**10
FLOAT16 = {
    "float16, fsdp=8": Case({"fsdp": 8}, dtype="float16"),
    "float16, tp=8": Case({"tp": 8}, dtype="float16"),
    "float16, fsdp=4 tp=2, full, tied": Case(SPLIT, method="full", tied=True, dtype="float16"),
    "float16, cp=4, full, padded": Case({"cp": 4}, method="full", packed=False, dtype="float16"),
    "float16, badam": Case(SPLIT, method="full", optimizer="badam", dtype="float16"),
}


def batches(packed: bool) -> list[dict[str, Any]]:
    """UPDATES batches [MICRO, ROWS, LENGTH] of random documents; about half of the positions are supervised.

    Tokens are drawn from few, so that there is something to learn.
    """
    import numpy as np

    rng = np.random.default_rng(5)
    stacked = []
    for _ in range(UPDATES):
        shape = (MICRO, ROWS, LENGTH)
        tokens = (rng.integers(0, 16, (*shape[:2], LENGTH + 1)) ** 2 % VOCAB).astype(np.int32)
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for a in range(MICRO):
            for b in range(ROWS):
                cuts = [0, *sorted(rng.choice(np.arange(1, LENGTH), 3, replace=False))] if packed else [0]
                cuts.append(
                    int(rng.integers(LENGTH // 2, LENGTH + 1)) if not packed else LENGTH - int(rng.integers(0, 2))
                )
                for number, (start, end) in enumerate(itertools.pairwise(cuts), start=1):
                    if end > start:
                        segments[a, b, start:end], positions[a, b, start:end] = number, np.arange(end - start)
        weights = ((segments > 0) & (rng.random(shape) < 0.5)).astype(np.float32)
        stacked.append(
            {
                "tokens": tokens[..., :-1],
                "targets": tokens[..., 1:],
                "positions": positions,
                "segment_ids": segments,
                "weights": weights,
            }
        )
    return stacked


def trajectory(case: Case, on_mesh: bool) -> dict[str, Any]:
    """Losses and gradient norms of every update, and a norm of each trained leaf at the end; in float16 also the scales
    that each device has, and the number of updates that were skipped."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshtune.adapters.config import FullConfig, LoraConfig
    from meshtune.adapters.method import abstract, prepare
    from meshtune.families import model_spec
    from meshtune.kernels.attention import zigzag_order
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.mesh.placement import place_batch, shardings
    from meshtune.model.compute import Compute
    from meshtune.model.gather import layout_for
    from meshtune.model.spec import init_params
    from meshtune.objectives.sft import sft_objective
    from meshtune.optim.build import OptimizerConfig, make_optimizer
    from meshtune.train.step import loss_scale
    from meshtune.train.step.build import make_train_step
    from meshtune.train.step.state import abstract_state, init_state

    model = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": case.tied, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.1,
    }  # fmt: skip
    spec = model_spec(model, "float32")
    method = FullConfig() if case.method == "full" else LoraConfig(rank=8, dropout=case.dropout)
    arrays = abstract(method, spec)
    prepared = prepare(method, spec, init_params(spec, jax.random.key(1)), jax.random.key(2))
    rate = {"prodigy": 1.0, "sgd": 1e-2}.get(case.optimizer, 1e-3)
    config = OptimizerConfig(case.optimizer, rate, in_backward=case.fused, rank=16, update_gap=10, switch_every=8)
    optimizer, _ = make_optimizer(config, UPDATES, arrays.trainable, arrays.spec)
    trainable, frozen, layout, order, like = prepared.trainable, prepared.frozen, None, None, None
    if on_mesh:
        mesh = MeshConfig(**case.mesh)
        layout, _ = layout_for(make_mesh(mesh, jax.devices()[: mesh.devices]), spec)
        trainable = jax.device_put(trainable, shardings(arrays.trainable, layout))
        frozen = jax.device_put(frozen, shardings(arrays.frozen, layout))
        like = abstract_state(arrays.trainable, optimizer, layout, dtype=case.dtype)
        order = zigzag_order(LENGTH, mesh.cp) if mesh.cp > 1 else None
    walks = case.fused or case.optimizer == "badam"
    compute = Compute(case.dtype, loss_chunk=16, layout=layout, remat="full" if walks else "none")
    step = make_train_step(
        sft_objective,
        arrays.spec,
        compute,
        optimizer,
        max_grad_norm=None if case.fused else 1.0,
        dropout=case.dropout > 0,
        abstract=arrays.trainable,
    )
    state = init_state(trainable, optimizer, like, dtype=case.dtype)
    if case.dtype == "float16":
        loss_scale.BACKOFF, loss_scale.INTERVAL = SECOND_SCALE / FIRST_SCALE, 10
        first = jax.device_put(jnp.float32(FIRST_SCALE), state.loss_scale["scale"].sharding)
        state = dataclasses.replace(state, loss_scale=state.loss_scale | {"scale": first})
    losses, norms, scales = [], [], []
    for batch in batches(case.packed):
        if case.fused:  # all rows at once
            batch = {name: array.reshape(1, -1, array.shape[-1]) for name, array in batch.items()}
        state, metrics = step(state, frozen, place_batch(batch, layout, order), np.int32(7))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if case.dtype == "float16":
            scales.append([float(shard.data) for shard in state.loss_scale["scale"].addressable_shards])
    ends = [float(np.linalg.norm(jax.device_get(leaf))) for leaf in jax.tree.leaves(state.trainable)]
    result = {"loss": losses, "grad_norm": norms, "weights": ends}
    if case.dtype == "float16":
        result |= {"scales": scales, "skipped": int(state.loss_scale["skipped"])}
    return result


def main(out: str, names: list[str]) -> None:
    alone: dict[str, dict[str, Any]] = {}
    results = {}
    for name in names:
        case = (CASES | OPTIMIZERS | FLOAT16)[name]
        unsharded = dataclasses.replace(case, mesh={})
        key = json.dumps(dataclasses.asdict(unsharded))
        alone[key] = alone.get(key) or trajectory(case, on_mesh=False)
        results[name] = {"one device": alone[key], "mesh": trajectory(case, on_mesh=True)}
    pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    main(sys.argv[1], sys.argv[2:])
